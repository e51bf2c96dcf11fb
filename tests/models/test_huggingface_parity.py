"""Logits and gradients equal the field's two reference models, with the same weights."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from narrowgauge.models import Transformer, model_config

B, T, V = 2, 48, 67


def tokens(seed):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def randomized(model):
    """Weights of a size at which every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            offset = 1.0 if "ln_" in name or "norm" in name else 0.0
            p.copy_(offset + 0.15 * torch.randn(p.shape, generator=generator))
    return model.eval()


def gpt2_tensors(theirs, layers, pick):
    """Our names -> their tensors (values or gradients, by `pick`); their Conv1D keeps weights transposed."""
    t = {name: pick(p) for name, p in theirs.named_parameters()}
    ours = {"embedding.weight": t["transformer.wte.weight"], "norm.weight": t["transformer.ln_f.weight"]}
    ours |= {
        "position_embedding.weight": t["transformer.wpe.weight"],
        "norm.bias": t["transformer.ln_f.bias"],
    }
    names = {"qkv": "attn.c_attn", "attention_out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    for i in range(layers):
        for mine, other in (names | norms).items():
            weight = t[f"transformer.h.{i}.{other}.weight"]
            ours[f"blocks.{i}.{mine}.weight"] = weight.T if mine in names else weight
            ours[f"blocks.{i}.{mine}.bias"] = t[f"transformer.h.{i}.{other}.bias"]
    return ours


def llama_tensors(theirs, layers, pick):
    """Our names -> their tensors; ours are fused: q, k and v, and gate and up."""
    t = {name: pick(p) for name, p in theirs.named_parameters()}
    ours = {"embedding.weight": t["model.embed_tokens.weight"], "norm.weight": t["model.norm.weight"]}
    if "lm_head.weight" in t:
        ours["head.weight"] = t["lm_head.weight"]
    for i in range(layers):
        theirs_i, ours_i = f"model.layers.{i}.", f"blocks.{i}."
        qkv = [t[f"{theirs_i}self_attn.{x}_proj.weight"] for x in "qkv"]
        ours[ours_i + "qkv.weight"] = torch.cat(qkv)
        ours[ours_i + "attention_out.weight"] = t[theirs_i + "self_attn.o_proj.weight"]
        gate_up = [t[f"{theirs_i}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        ours[ours_i + "gate_up.weight"] = torch.cat(gate_up)
        ours[ours_i + "down.weight"] = t[theirs_i + "mlp.down_proj.weight"]
        ours[ours_i + "attention_norm.weight"] = t[theirs_i + "input_layernorm.weight"]
        ours[ours_i + "mlp_norm.weight"] = t[theirs_i + "post_attention_layernorm.weight"]
        for norm in ("q_norm", "k_norm"):
            if f"{theirs_i}self_attn.{norm}.weight" in t:
                ours[f"{ours_i}{norm}.weight"] = t[f"{theirs_i}self_attn.{norm}.weight"]
    return ours


def assert_same_model(ours, theirs, tensors):
    """Copies their weights over, then compares logits, loss and every gradient."""
    weights = tensors(theirs, ours.config.layers, lambda p: p.detach())
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing in ([], ["head.weight"])
    x_BT, y_BT = tokens(2), tokens(3)
    logits_BTV = theirs(x_BT).logits
    assert logits_BTV.std() > 0.3
    assert (ours(x_BT) - logits_BTV).abs().max() < 1e-5
    loss, expected = (
        ours.loss(x_BT, y_BT),
        torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()),
    )
    assert abs(loss - expected) < 1e-5
    loss.backward()
    expected.backward()
    gradients = tensors(theirs, ours.config.layers, lambda p: p.grad)
    for name, p in ours.named_parameters():
        assert (p.grad - gradients[name]).norm() < 1e-5 * gradients[name].norm() + 1e-7, name


def test_gpt2():
    config = GPT2Config(
        vocab_size=V,
        n_positions=64,
        n_embd=48,
        n_layer=3,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    sizes = {"dim": 48, "layers": 3, "heads": 4, "ffn_dim": 192, "vocab_size": V, "max_sequence_length": 64}
    ours = Transformer(model_config("gpt2-debug", **sizes))
    assert_same_model(ours, randomized(GPT2LMHeadModel(config)), gpt2_tensors)


LLAMA = {"dim": 64, "layers": 3, "heads": 4, "ffn_dim": 96, "vocab_size": V, "max_sequence_length": 64}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain-rope", "scaled-rope"])
@pytest.mark.parametrize(("tied", "head_dim"), [(True, 16), (False, 24)])
def test_llama(kv_heads, scaled, tied, head_dim):
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 500.0} | (SCALING if scaled else {"rope_type": "default"}),
        tie_word_embeddings=tied,
    )
    overrides = {"kv_heads": kv_heads, "head_dim": head_dim, "tied_head": tied, "rope_theta": 500.0}
    if scaled:
        overrides |= {"rope_factor": 8.0, "rope_original_positions": 16}
    ours = Transformer(model_config("debug", **(LLAMA | overrides)))
    assert_same_model(ours, randomized(LlamaForCausalLM(config)), llama_tensors)


def test_qwen3():
    """Its heads are normalised before they are turned."""
    config = Qwen3Config(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    overrides = {"kv_heads": 2, "head_dim": 24, "rope_theta": 500.0, "qk_norm": True}
    ours = Transformer(model_config("debug", **LLAMA | overrides))
    assert_same_model(ours, randomized(Qwen3ForCausalLM(config)), llama_tensors)

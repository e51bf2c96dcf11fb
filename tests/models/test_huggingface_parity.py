"""Logits and gradients equal the field's reference models, with the same weights."""

import pytest
import torch
import transformers as hf

from narrowgauge.trainer.models import Transformer, model_config

V = 67


def tokens(seed):
    return torch.randint(V, (2, 48), generator=torch.Generator().manual_seed(seed))


def randomized(model):
    """Weights of a size at which every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            offset = 1.0 if "ln_" in name or "norm" in name else 0.0
            p.copy_(offset + 0.15 * torch.randn(p.shape, generator=generator))
    return model.eval()


def gpt2_tensors(t, layers):
    """Our names -> their tensors, values or gradients; their Conv1D keeps weights transposed."""
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


def llama_tensors(t, layers):
    """Our names -> their tensors; ours are fused: q, k and v, and gate and up."""
    ours = {"embedding.weight": t["model.embed_tokens.weight"], "norm.weight": t["model.norm.weight"]}
    if "lm_head.weight" in t:
        ours["head.weight"] = t["lm_head.weight"]
    fused = {
        "qkv": [f"self_attn.{x}_proj" for x in "qkv"],
        "attention_out": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
        "attention_norm": ["input_layernorm"],
        "mlp_norm": ["post_attention_layernorm"],
        "q_norm": ["self_attn.q_norm"],
        "k_norm": ["self_attn.k_norm"],
    }
    for i in range(layers):
        for mine, others in fused.items():
            theirs = [f"model.layers.{i}.{other}.weight" for other in others]
            if theirs[0] in t:
                ours[f"blocks.{i}.{mine}.weight"] = torch.cat([t[name] for name in theirs])
    return ours


def assert_same_model(ours, theirs, tensors):
    """Copies their weights over, then compares logits, loss and every gradient."""
    theirs, layers = randomized(theirs), ours.config.layers
    weights = tensors({name: p.detach() for name, p in theirs.named_parameters()}, layers)
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing in ([], ["head.weight"])
    x_BT, y_BT = tokens(2), tokens(3)
    logits_BTV = theirs(x_BT).logits
    assert logits_BTV.std() > 0.3
    assert (ours(x_BT) - logits_BTV).abs().max() < 1e-5
    loss = ours.loss(x_BT, y_BT)
    expected = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
    assert abs(loss - expected) < 1e-5
    loss.backward()
    expected.backward()
    gradients = tensors({name: p.grad for name, p in theirs.named_parameters()}, layers)
    for name, p in ours.named_parameters():
        assert (p.grad - gradients[name]).norm() < 1e-5 * gradients[name].norm() + 1e-7, name


def test_gpt2():
    sizes = {"n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
    config = hf.GPT2Config(vocab_size=V, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **sizes)
    sizes = {"dim": 48, "layers": 3, "heads": 4, "ffn_dim": 192, "vocab_size": V, "max_sequence_length": 64}
    ours = Transformer(model_config("gpt2-debug", **sizes))
    assert_same_model(ours, hf.GPT2LMHeadModel(config), gpt2_tensors)


SIZES = {
    **{"vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}
SCALING = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 16, "rope_theta": 500.0},
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "tied", "rope", "is_qwen3"),
    [
        (4, 16, True, PLAIN, False),
        (2, 24, False, SCALING, False),
        (1, 16, True, SCALING, False),
        (2, 24, False, PLAIN, True),  # whose heads are normalised before they are turned
    ],
)
def test_llama_and_qwen3(kv_heads, head_dim, tied, rope, is_qwen3):
    config, model = (
        (hf.Qwen3Config, hf.Qwen3ForCausalLM) if is_qwen3 else (hf.LlamaConfig, hf.LlamaForCausalLM)
    )
    theirs = {"num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": tied}
    overrides = {
        "dim": 64,
        "layers": 3,
        "heads": 4,
        "ffn_dim": 96,
        "vocab_size": V,
        "max_sequence_length": 64,
    }
    overrides |= {"kv_heads": kv_heads, "head_dim": head_dim, "tied_head": tied, "rope_theta": 500.0}
    if rope is SCALING:
        overrides |= {"rope_factor": 8.0, "rope_original_positions": 16}
    ours = Transformer(model_config("debug", qk_norm=is_qwen3, **overrides))
    assert_same_model(ours, model(config(rope_parameters=rope, **SIZES, **theirs)), llama_tensors)

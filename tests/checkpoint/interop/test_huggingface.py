"""Folders of transformers, in and out: the same logits, whoever wrote and whoever reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from checkpoint.interop.models import ours_from, refused
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.hf_config import config_from, to_config
from narrowgauge.trainer.checkpoint.interop.huggingface import read_folder, write_folder
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import INDEX
from narrowgauge.trainer.models import Transformer, initialize, model_config

V, T = 67, 48
SMALL = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 96, "vocab_size": V}
IDS = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
GPT2 = {"n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
OTHERS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
OTHERS |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
#: What a family needs besides.
NEEDS = {
    "gpt2": GPT2,
    "llama": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    "mistral": {"sliding_window": None, "head_dim": 24},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 24, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
MODELS = [
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 80}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-5}),
    ("llama", {"rope_parameters": SCALED}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    ("qwen3", {}),
    ("mistral", {}),
    ("mixtral", {}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"norm_topk_prob": False}),
]


def make(family, **changes):
    """A small model of a family of transformers."""
    values = {"vocab_size": V} | ({} if family == "gpt2" else OTHERS) | NEEDS.get(family, {}) | changes
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))


@pytest.fixture(params=MODELS, ids=lambda p: f"{p[0]} {p[1]}")
def theirs(request):
    """Weights of a size at which every part of the model shows in the logits."""
    family, changes = request.param
    model = make(family, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            offset = 1.0 if "ln_" in name or "norm" in name else 0.0
            p.copy_(offset + 0.15 * torch.randn(p.shape, generator=generator))
    return model.eval()


def test_folders_of_either_give_both_the_same_logits_and_gradients(theirs, tmp_path):
    """Read, written again in parts, opened by transformers: nothing is missing, nothing is left over.

    A folder of gradients is read as one of weights, by the same names.
    """
    theirs.save_pretrained(tmp_path / "theirs")
    foreign, logits = read_folder(tmp_path / "theirs"), theirs(IDS).logits
    ours, targets = ours_from(foreign), IDS.roll(-1, 1)
    assert logits.std() > 0.3
    assert (ours(IDS) - logits).abs().max() < 1e-5
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", foreign.config, foreign.tensors, None, shard_bytes=30_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (again.eval()(IDS).logits - logits).abs().max() < 1e-5
    assert torch.equal(ours_from(read_folder(tmp_path / "ours"))(IDS), ours(IDS))

    loss, expected = ours.loss(IDS, targets), cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert abs(loss - expected) < 1e-5
    loss.backward()
    expected.backward()
    for p in theirs.parameters():
        p.data = p.grad
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = read_folder(tmp_path / "gradients").tensors
    for name, p in ours.named_parameters():
        assert (p.grad - gradients[name]).norm() < 1e-5 * gradients[name].norm() + 1e-7, name


QWEN3 = model_config("qwen2.5-0.5b", qkv_bias=False, qk_norm=True)
NAMED = ("gpt2-124m", "gpt3-6.7b", "llama3-1b", "llama3-405b", "qwen2.5-7b", "mixtral-8x7b", "qwen3-30b-a3b")


def test_a_configuration_comes_back():
    for config in (QWEN3, *map(model_config, NAMED)):
        values = to_config(config)
        assert config_from(values, "here") == config
        if values.get("rope_scaling"):  # as older versions have it
            values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")
            assert config_from(values, "here") == config
    assert to_config(QWEN3)["architectures"] == ["Qwen3ForCausalLM"]


def test_initial_weights_by_role_are_no_initializer_range():
    """It is one standard deviation for all weights; without it the reader has its own."""
    values = to_config(model_config("debug"))
    assert "initializer_range" not in values
    assert config_from(values, "here").initial_std == 0.02
    assert to_config(model_config("debug", initial_std=0.01))["initializer_range"] == 0.01


def test_the_balance_of_experts_and_its_gradient_are_those_of_transformers(tmp_path):
    theirs = make("mixtral", num_hidden_layers=1)
    theirs.save_pretrained(tmp_path)
    ours = ours_from(read_folder(tmp_path))
    ours.balance_loss = 0.1
    out = theirs(IDS, output_router_logits=True)
    balance = 0.1 * load_balancing_loss_func(out.router_logits, 5, 2)
    loss = ours.loss(IDS, IDS)
    torch.testing.assert_close(loss[3], balance)
    (found,) = torch.autograd.grad(loss[0], ours.blocks[0].experts.router.weight)
    expected = cross_entropy(out.logits.flatten(0, 1), IDS.flatten()) + balance
    (expected,) = torch.autograd.grad(expected, theirs.model.layers[0].mlp.gate.weight)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_weights_without_the_head_and_with_old_buffers_are_read(tmp_path):
    """As on the hub: GPT-2's names there begin with `h.0.`, and its masks are stored."""
    model = make("gpt2")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in stored.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(bare, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert (ours_from(read_folder(tmp_path))(IDS) - model.eval()(IDS).logits).abs().max() < 1e-5


def test_narrower_weights_are_rounded_once(tmp_path):
    model = Transformer(model_config("debug", **SMALL))
    initialize(model, 0)
    write_folder(tmp_path, model.config, model.state_dict(), None, torch.float16)
    back = read_folder(tmp_path).tensors
    assert all(torch.equal(back[n], p.half().float()) for n, p in model.state_dict().items())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float16"


WINDOWED = {"model_type": "mistral"}  # by the default of that family
MIXTRAL = to_config(model_config("mixtral-8x7b"))
EXPERTS = [{"sliding_window": 8}, {"router_jitter_noise": 0.1}, {"mlp_only_layers": [0]}]
#: Changes of a folder's configuration, and the words that refuse them.
NOT_COMPUTED = [
    ({"model_type": "lama"}, ["unknown model_type 'lama'", "'llama'"]),
    ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["scaled by 'yarn'"]),
    (WINDOWED, ["sliding_window = 4096"]),
    (WINDOWED | {"sliding_window": 32}, ["sliding_window = 32"]),
    ({"use_sliding_window": True}, ["use_sliding_window = True"]),
    ({"layer_types": ["sliding_attention"]}, ["sliding window"]),
    ({"layer_types": ["full_attention", "linear_attention"]}, ["another attention"]),
    ({"layer_types": 3}, ["another attention"]),
    ({"head_dim": 10**30}, ["head_dim = 1000", "exceeds the size of any model"]),
    ({"quantization_config": "fp8"}, ["quantization_config = 'fp8' is not a table"]),
    ({"attention_bias": True}, ["attention or MLP alone"]),
    ({"quantization_config": {"quant_method": "gptq"}}, ["quantized by 'gptq'", "compressed-tensors"]),
    ({"hidden_size": "64"}, ["describes an impossible model", "64"]),
    ({"num_hidden_layers": 10**9}, ["1000000000 layers", "tensors"]),
    ({"num_hidden_layers": 2}, ["no place", "model.layers.2."]),
    ({"num_hidden_layers": 4}, ["no tensor 'model.layers.3."]),
    ({"intermediate_size": 95}, ["shape", "(96, 64)", "95, 95 rows"]),
    ({"rope_theta": "x"}, ["describes an impossible model"]),
    ({"vocab_size": True}, ["vocab_size = True"]),
    (to_config(QWEN3) | {"attention_bias": True}, ["attention_bias = True"]),
    *((MIXTRAL | more, [f"{key} = ", "is computed here; give a model"]) for more in EXPERTS for key in more),
]


def test_what_is_not_computed_is_refused_in_a_sentence(tmp_path):
    model = Transformer(model_config("debug", **SMALL))
    write_folder(tmp_path, model.config, model.state_dict(), None)
    assert not (tmp_path / INDEX).exists(), "a small model has no index"
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    for changes, words in NOT_COMPUTED:
        config.write_text(json.dumps(values | changes))
        refused(tmp_path, tmp_path, *words)
    # transformers adds it to the weights, so that the weights alone are another model
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(tmp_path, "an adapter (PEFT, LoRA) are not read here; merge it")


NO_FAMILY = "no family of Hugging Face's"
#: Models that no family has, and the words that refuse them.
NOT_WRITTEN = [
    *(("debug", {name: value}, NO_FAMILY) for name, value in (("norm", "layer"), ("mlp", "gelu"))),
    ("debug", {"positions": "learned"}, NO_FAMILY),
    ("debug", {"bias": True, "qkv_bias": False}, NO_FAMILY),
    ("debug", {"experts": 4, "norm_topk_prob": False}, NO_FAMILY),
    *((name, {"qk_norm": True}, "qk_norm = True") for name in ("qwen2.5-0.5b", "gpt2-124m")),
]


def test_a_mixture_that_no_family_has_is_refused():
    for name, changes, words in NOT_WRITTEN:
        with pytest.raises(UserError, match=words):
            to_config(model_config(name, **changes))


# Folders that hold more than one answer: what transformers reads is read, or nothing.


def test_a_head_of_its_own_is_not_dropped_for_a_configuration_that_ties_it(tmp_path):
    """transformers 5 takes both tensors then; the embedding alone would give other logits."""
    model = make("llama")
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    refused(tmp_path, "'lm_head.weight' that differs from its embedding")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    assert read_folder(tmp_path).config.tied_head


@torch.no_grad()
def test_of_parts_and_one_file_the_file_is_read_as_in_transformers(tmp_path):
    """`save_pretrained` into a folder of parts leaves their index; other tools leave the parts as well."""
    make("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    newer = make("llama")
    save_file(newer.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (tmp_path / INDEX).exists()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits
    assert (ours_from(read_folder(tmp_path))(IDS) - expected).abs().max() < 1e-5
    newer.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model-*"))
    assert (ours_from(read_folder(tmp_path))(IDS) - expected).abs().max() < 1e-5


def test_a_key_that_is_missing_has_the_default_of_transformers():
    least = {name: OTHERS[name] for name in ("intermediate_size", "num_hidden_layers")} | {"vocab_size": V}
    least |= {"hidden_size": 128, "num_attention_heads": 32}
    for family in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
        values = least | ({"sliding_window": None} if family == "mistral" else {})
        theirs = AutoConfig.for_model(family, **values)
        ours = config_from(values | {"model_type": family}, "config.json")
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or ours.dim // ours.heads)
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.max_sequence_length == theirs.max_position_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.tied_head == theirs.tie_word_embeddings
        if ours.experts:
            assert (ours.experts, ours.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)

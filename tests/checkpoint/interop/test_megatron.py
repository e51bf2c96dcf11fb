"""Megatron-Core's names and order: out, in again, and the grouped rows against its own way to cut them."""

import tomllib

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge.checkpoint.interop.megatron import read_megatron, write_megatron
from narrowgauge.checkpoint.interop.safetensors_reader import SHARD_BYTES
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, initialize, model_config

LLAMA = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 96, "vocab_size": 130}
GPT2 = {"dim": 64, "layers": 2, "heads": 4, "ffn_dim": 96, "vocab_size": 130}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("debug", LLAMA),
        ("debug", LLAMA | {"qkv_bias": True, "tied_head": True, "rope_factor": 8.0}),
        ("gpt2-debug", GPT2),
        ("gpt2-debug", GPT2 | {"tied_head": False}),
    ],
)
def test_a_model_comes_back(tmp_path, name, changes):
    model = Transformer(model_config(name, **changes))
    initialize(model, 3)
    write_megatron(tmp_path, model.config, model.state_dict(), torch.float32, SHARD_BYTES)
    there = read_megatron(tmp_path)
    assert there.config == model.config
    assert there.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(there.tensors[n], p) for n, p in model.state_dict().items())
    arguments = tomllib.loads((tmp_path / "megatron.toml").read_text())["arguments"]
    assert arguments["num-layers"] == 2
    assert arguments.get("num-query-groups") == (2 if name == "debug" else None)
    assert arguments.get("swiglu", False) == (name == "debug")
    assert arguments.get("untie-embeddings-and-output-weights", False) != model.config.tied_head


def test_names_groups_and_padding_are_megatrons(tmp_path):
    model = Transformer(model_config("debug", **LLAMA))
    initialize(model, 0)
    write_megatron(tmp_path, model.config, model.state_dict(), torch.float32, SHARD_BYTES)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["embedding.word_embeddings.weight"].shape == (256, 64)
    assert not tensors["output_layer.weight"][130:].any()
    # As its attention splits a projection: [groups, heads of a group + 2, head_dim].
    mixed = tensors["decoder.layers.1.self_attention.linear_qkv.weight"].view(2, 4, 16, 64)
    q, k, v = mixed.split([2, 1, 1], dim=1)
    ours = model.blocks[1].qkv.weight
    assert torch.equal(torch.cat([q.reshape(64, 64), k.reshape(32, 64), v.reshape(32, 64)]), ours)
    gate, up = tensors["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(torch.cat([gate, up]), model.blocks[0].gate_up.weight)


def test_damage_is_refused(tmp_path):
    model = Transformer(model_config("debug", **LLAMA))
    write_megatron(tmp_path, model.config, model.state_dict(), torch.float32, SHARD_BYTES)
    settings = tmp_path / "megatron.toml"
    text = settings.read_text()
    for change, words in [
        (text.replace("[model]", "[modle]"), "cannot be used"),
        (text.replace("layers = 2", "layers = 3"), r"no tensor 'decoder\.layers\.2"),
        (
            text.replace("\nheads = 4", "\nheads = 8").replace("head_dim = 16", "head_dim = 8"),
            "has shape",
        ),
    ]:
        settings.write_text(change)
        with pytest.raises(UserError, match=words):
            read_megatron(tmp_path)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    """It was left out silently: a model that was trained with more than its settings say."""
    model = Transformer(model_config("debug", **LLAMA))
    write_megatron(tmp_path, model.config, model.state_dict(), torch.float32, SHARD_BYTES)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "decoder.layers.0.self_attention.linear_qkv"
    save_file(tensors | {f"{layer}._extra_state": torch.ones(1)}, tmp_path / "model.safetensors")
    read_megatron(tmp_path)
    save_file(tensors | {f"{layer}.bias": torch.ones(128)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=rf"a tensor '{layer}\.bias', for which its megatron\.toml has no place"
    ):
        read_megatron(tmp_path)


def test_rotary_positions_that_megatron_does_not_have_are_refused(tmp_path):
    """`--use-rope-scaling` takes a factor alone: other turns and another context would be lost."""
    model = Transformer(model_config("debug", **LLAMA, rope_factor=8.0, rope_original_positions=2048))
    with pytest.raises(UserError, match=r"\(1\.0, 4\.0, 2048\), and .* has \(1\.0, 4\.0, 8192\) fixed"):
        write_megatron(tmp_path, model.config, model.state_dict(), torch.float32, SHARD_BYTES)

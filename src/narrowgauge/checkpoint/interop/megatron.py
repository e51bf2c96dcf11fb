"""Megatron-Core's tensor names and row order, in safetensors and TOML.

Megatron-LM's own checkpoints are pickles (`torch.save`, and the metadata of its distributed ones), and
nothing here is ever pickled or unpickled. The exchange format is therefore a folder:

    model.safetensors      the tensors that Megatron-Core's `GPTModel` has, under its names
    megatron.toml          [arguments]: the options of Megatron-LM's command line that build this model
                           [model]: the same in our names

In a program that uses Megatron-Core, `model.load_state_dict(safetensors.torch.load_file(...), strict=False)`
loads it, for one rank (no tensor or pipeline parallelism) and the local layer specification.
TransformerEngine's specification has other names for two tensors: `input_layernorm.weight` is
`self_attention.linear_qkv.layer_norm_weight`, and `pre_mlp_layernorm.weight` is
`mlp.linear_fc1.layer_norm_weight`.

    embedding, position_embedding    embedding.word_embeddings, embedding.position_embeddings
    blocks.I.attention_norm          decoder.layers.I.input_layernorm
    blocks.I.qkv                     decoder.layers.I.self_attention.linear_qkv
    blocks.I.q_norm, .k_norm         decoder.layers.I.self_attention.q_layernorm, k_layernorm
    blocks.I.attention_out           decoder.layers.I.self_attention.linear_proj
    blocks.I.mlp_norm                decoder.layers.I.pre_mlp_layernorm
    blocks.I.gate_up or .up          decoder.layers.I.mlp.linear_fc1        (gate first)
    blocks.I.down                    decoder.layers.I.mlp.linear_fc2
    norm, head                       decoder.final_layernorm, output_layer

(Source: NVIDIA/Megatron-LM, `megatron/core/models/gpt/` and `core/transformer/attention.py`.) The rows
of `linear_qkv` are grouped by key-value head: the query heads of the first group, its key, its value,
then the second group. The vocabulary is padded with rows of zeros to a multiple of 128
(`--make-vocab-size-divisible-by`).
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from narrowgauge.checkpoint.interop.name_map import (
    ExternalModel,
    external_model,
    require_layers,
    stored_names,
)
from narrowgauge.checkpoint.interop.safetensors_reader import TensorFolder, inside, write_tensors
from narrowgauge.checkpoint.store.manifest import read_bounded
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig

SETTINGS = "megatron.toml"
_PAD_TO = 128
_ROPE_SCALING = (1.0, 4.0, 8192)  # Llama 3.1's, in `RotaryEmbedding._apply_scaling`
_NAMES = {
    "embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "q_norm": "self_attention.q_layernorm",
    "k_norm": "self_attention.k_layernorm",
    "attention_out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "gate_up": "mlp.linear_fc1",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}


def read_megatron(folder: Path) -> ExternalModel:
    """The model in a folder that `write_megatron` wrote; a `UserError` if it is anything else, or damaged."""
    settings = inside(folder, SETTINGS)
    try:
        config = ModelConfig(**tomllib.loads(read_bounded(settings, 1 << 20).decode("utf-8"))["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / SETTINGS} cannot be used: {error}; make the folder again with "
            "'narrowgauge export --to megatron'"
        ) from None
    tensors = {}
    with TensorFolder(folder) as files:
        require_layers(config, len(files.file_of), folder)
        names = {_their_name(ours): ours for ours in stored_names(config)}
        if missing := sorted(names.keys() - files.file_of):
            raise UserError(
                f"{folder} has no tensor {missing[0]!r}, which its {SETTINGS} asks for; make it again"
            )
        stored = {name for name in files.file_of if not name.endswith("._extra_state")}  # of FP8 layers
        if extra := sorted(stored - names.keys()):
            raise UserError(
                f"{folder} has a tensor {extra[0]!r}, for which its {SETTINGS} has no place; give weights "
                "and settings of one model"
            )
        for name, ours in names.items():
            tensors[ours] = _to_ours(ours, files.read(name), config)
    tokenizer = inside(folder, "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    return external_model("megatron", config, tensors, folder, tokenizer, files.precisions)


def write_megatron(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Fill an empty folder with a model in our names; a `UserError` if Megatron-Core cannot express it."""
    _require_megatrons(config)
    named = [(_their_name(ours), _to_theirs(ours, tensors[ours], config)) for ours in stored_names(config)]
    write_tensors(folder, named, dtype, shard_bytes)
    lines = []
    for section, table in (("arguments", arguments(config)), ("model", asdict(config))):
        # Integers, booleans and plain strings look the same in TOML and JSON.
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""]
    (folder / SETTINGS).write_text("\n".join(lines), encoding="utf-8")


def _require_megatrons(config: ModelConfig) -> None:
    """Refuse a model that Megatron-Core cannot express."""
    if config.experts:
        raise UserError(
            f"model.experts = {config.experts}: Megatron-Core's names of experts depend on how its run "
            "groups and shards them, and none is written here; use --to hf"
        )
    if config.qk_norm and config.norm != "rms":
        raise UserError(
            "model.qk_norm is an RMSNorm, and Megatron-Core normalises heads as it does everything else: "
            f"with model.norm = {config.norm} it has no such model; use --to hf"
        )
    scaling = (config.rope_low_freq_factor, config.rope_high_freq_factor, config.rope_original_positions)
    if config.positions == "rope" and config.rope_factor != 1 and scaling != _ROPE_SCALING:
        raise UserError(
            "model.rope_low_freq_factor, rope_high_freq_factor and rope_original_positions are "
            f"{scaling}, and Megatron-Core's --use-rope-scaling has {_ROPE_SCALING} fixed; use --to hf"
        )


def arguments(config: ModelConfig) -> dict[str, Any]:
    """Megatron-LM's options for a model, without the dashes; true means an option without a value."""
    c = config
    values: dict[str, Any] = {
        "num-layers": c.layers,
        "hidden-size": c.dim,
        "num-attention-heads": c.heads,
        "kv-channels": c.head_dim,
        "ffn-hidden-size": c.ffn_dim,
        "max-position-embeddings": c.max_sequence_length,
        "vocab-size": c.vocab_size,
        "make-vocab-size-divisible-by": _PAD_TO,
        "position-embedding-type": "learned_absolute" if c.positions == "learned" else "rope",
        "normalization": "LayerNorm" if c.norm == "layer" else "RMSNorm",
        "norm-epsilon": c.norm_eps,
        **({"init-method-std": c.initial_std} if c.initial_std else {}),
        "hidden-dropout": c.dropout,
        "attention-dropout": c.attention_dropout,
    }
    if c.kv_heads != c.heads:
        values |= {"group-query-attention": True, "num-query-groups": c.kv_heads}
    if c.positions == "rope":
        values["rotary-base"] = c.rope_theta
    if c.positions == "rope" and c.rope_factor != 1:
        values |= {"use-rope-scaling": True, "rope-scaling-factor": c.rope_factor}
    flags = {
        "swiglu": c.mlp == "swiglu",
        "qk-layernorm": c.qk_norm,
        "disable-bias-linear": not c.bias,
        "add-qkv-bias": bool(c.qkv_bias) and not c.bias,
        "untie-embeddings-and-output-weights": not c.tied_head,
    }
    return values | {flag: True for flag, given in flags.items() if given}


def _their_name(ours: str) -> str:
    module, parameter = ours.rsplit(".", 1)
    if match := re.fullmatch(r"blocks\.(\d+)\.(\w+)", module):
        return f"decoder.layers.{match[1]}.{_NAMES[match[2]]}.{parameter}"
    return f"{_NAMES[module]}.{parameter}"


def _to_theirs(ours: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    if ".qkv." in ours:
        return tensor[_grouped_rows(config)]
    if ours in ("embedding.weight", "head.weight"):
        pad = -config.vocab_size % _PAD_TO
        return torch.cat([tensor, tensor.new_zeros(pad, config.dim)])
    return tensor


def _to_ours(ours: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    if ".qkv." in ours:
        rows = _grouped_rows(config)
        return tensor[rows.argsort()] if len(rows) == len(tensor) else tensor  # else its shape is refused
    return tensor[: config.vocab_size] if ours in ("embedding.weight", "head.weight") else tensor


def _grouped_rows(config: ModelConfig) -> torch.Tensor:
    """The index of our row of qkv for each row of theirs."""
    N, K, H = config.heads, config.kv_heads, config.head_dim
    q, k, v = torch.arange((N + 2 * K) * H).split([N * H, K * H, K * H])
    groups = [x.view(K, -1) for x in (q, k, v)]
    return torch.cat(groups, dim=1).flatten()

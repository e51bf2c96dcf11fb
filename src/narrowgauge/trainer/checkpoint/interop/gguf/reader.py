"""Reads a model from a GGUF file of any program: configuration, weights and tokenizer, from the file alone.

    keys `ARCH.*` and the names of tensors      the configuration
    BF16, F16, F32, and what gguf decodes       the weights, as float32
    keys `tokenizer.ggml.*`                     the tokenizer, of the rules that GGUF names (`tokenizer.py`)

GGUF has no key for three choices. Biases follow from the tensors that are there. A head is tied if it is
missing, or the embedding in another dtype, as the forward pass of a recipe multiplies it. The scaling of
rotary positions follows from `rope_freqs`: its largest divisor is the factor, and the rest must be that of
Llama 3.1 with 8192 original positions, or with `rope.scaling.original_context_length`.

A `tokenizer.json` in the same folder, as `export` leaves it, is the model's. Anything else that would be lost
is refused: other types, tensors without a place, other scalings.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.checkpoint.interop.gguf.container import (
    PLAIN,
    StoredRows,
    is_readable,
    plain_rows,
    read_gguf,
    values_of,
)
from narrowgauge.trainer.checkpoint.interop.gguf.model import (
    EXPERT_KEYS,
    KEYS,
    NORM_EPS,
    ROPE_FREQUENCIES,
    gguf_map,
    read_gguf_model,
    scale_name,
    stack_of,
)
from narrowgauge.trainer.checkpoint.interop.gguf.tokenizer import settings_of, tokenizer_of
from narrowgauge.trainer.checkpoint.interop.name_map import ExternalModel, external_model, require_layers
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.models import ModelConfig
from narrowgauge.trainer.models.layers import rope_frequencies, rope_shares

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gpt2")
_HEAD = "output.weight"
_ORIGINAL_POSITIONS = 8192  # of Llama 3.1 and 3.2
#: Scales of activations, which are skipped.
_INPUT_SCALE = ".input_scale"


def read_gguf_external(path: Path) -> ExternalModel:
    """The model in a GGUF file; nothing in it is executed."""
    file = read_gguf(path)
    tensors = file.tensors
    config = _config(path, file.metadata, tensors)
    require_layers(config, len(tensors), path)
    config = _with_rope(path, config, file.metadata, tensors)
    _require_all(path, config, tensors)
    weights = read_gguf_model(path, config)
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{path}: the weight {name!r} is not finite; fetch the file again")
    beside = path.parent / TOKENIZER_FILE
    kinds = {t.type.lower() for t in tensors.values() if len(t.shape) > 1}
    tokenizer = beside if beside.is_file() else None
    model = external_model("gguf", config, weights, path, tokenizer, kinds)
    made = None if tokenizer is not None else tokenizer_of(file.metadata)
    return replace(model, made_tokenizer=made, special_tokens=settings_of(file.metadata))


def _config(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredRows]) -> ModelConfig:
    arch = str(metadata.get("general.architecture", ""))
    if arch not in _ARCHITECTURES:
        raise unknown(f"architecture of {path}", arch, _ARCHITECTURES)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{path} has no matrix 'token_embd.weight'; give a language model")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "") or f"{arch}.rope.scale_linear" in metadata:
        raise UserError(
            f"{path}: rotary positions are scaled by {scaling!r}, which this model does not compute; give a "
            "model without"
        )

    def count(name: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{name}", default)
        if type(value) is not int:
            raise UserError(
                f"{path}: {arch}.{name} = {value!r}, and one integer is read for all layers; give another "
                "model"
            )
        return value

    def number(name: str, default: float) -> float:
        value = metadata.get(f"{arch}.{name}", default)
        return float(value) if isinstance(value, int | float) else default

    dim, heads = count(KEYS["dim"]), count(KEYS["heads"])
    keys = KEYS | (EXPERT_KEYS if count("expert_count", 0) else {})
    if f"{arch}.{keys['ffn_dim']}" not in metadata:
        keys |= {"ffn_dim": KEYS["ffn_dim"]}
    defaults = {"kv_heads": heads, "head_dim": dim // max(1, heads), "experts_per_token": 2}
    common: dict[str, Any] = {ours: count(theirs, defaults.get(ours)) for ours, theirs in keys.items()}
    for name in ("attention.value_length", "rope.dimension_count"):
        if count(name, common["head_dim"]) != common["head_dim"]:
            raise UserError(
                f"{path}: {arch}.{name} differs from the width of a head, {common['head_dim']}, and this "
                "model has one width; give another model"
            )
    is_gpt2 = arch == "gpt2"
    common["vocab_size"] = embedding.shape[0]
    common["tied_head"] = _HEAD not in tensors or _is_rounded(embedding, tensors[_HEAD])
    common["norm_eps"] = _decimal(number(NORM_EPS[is_gpt2], 1e-5))
    if is_gpt2:
        return ModelConfig(**common, positions="learned", norm="layer", mlp="gelu", bias=True)
    return ModelConfig(
        **common,
        rope_theta=number("rope.freq_base", 10_000.0),
        bias="blk.0.attn_output.bias" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def _is_rounded(embedding: StoredRows, head: StoredRows) -> bool:
    """Whether a head is the embedding in another dtype: what a recipe multiplies of a tied one."""
    if embedding.type not in PLAIN or head.type not in PLAIN or embedding.shape != head.shape:
        return False
    return np.array_equal(plain_rows(values_of(embedding), PLAIN[head.type]).data, head.data)


def _decimal(value: float) -> float:
    """The short decimal number that a float32 was: 1e-5 is stored as 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _with_rope(
    path: Path, config: ModelConfig, metadata: Mapping[str, Any], tensors: Mapping[str, StoredRows]
) -> ModelConfig:
    """The configuration with the scaling that `rope_freqs` holds."""
    stored = tensors.get(ROPE_FREQUENCIES)
    if stored is None:
        return config
    divisors = values_of(stored)
    factor, arch = _decimal(float(divisors.max())), metadata["general.architecture"]
    original = metadata.get(f"{arch}.rope.scaling.original_context_length", _ORIGINAL_POSITIONS)
    if type(original) is int and factor > 1 and divisors.shape == (config.head_dim // 2,):
        scaled = replace(config, rope_factor=factor, rope_original_positions=original)
        expected = 1 / rope_shares(scaled, rope_frequencies(scaled, torch.device("cpu")))
        if torch.allclose(divisors, expected, rtol=1e-5, atol=0):
            return scaled
    raise UserError(
        f"{path}: {ROPE_FREQUENCIES} is not the scaling of Llama 3.1 with {original} original positions; "
        "give the model as a Hugging Face folder, whose config.json names it"
    )


def _require_all(path: Path, config: ModelConfig, tensors: Mapping[str, StoredRows]) -> None:
    """Refuse a file with other tensors than the model's, or in types that are not read."""
    pairs = [p for p in gguf_map(config) if p.ours != "head.weight" or _HEAD in tensors]
    needed = {stack_of(name) for pair in pairs for name in pair.theirs}
    if missing := sorted(needed - tensors.keys()):
        raise UserError(f"{path} has no tensor {missing[0]!r}, which its keys ask for; fetch it again")
    known = needed | {scale_name(name) for name in needed if name.endswith("weight")} | {ROPE_FREQUENCIES}
    for name, tensor in tensors.items():
        if name not in known and not name.endswith(_INPUT_SCALE):
            raise UserError(
                f"{path} has a tensor {name!r}, for which its keys have no place; give a plain model"
            )
        if tensor.type not in PLAIN and not is_readable(tensor.type):
            raise UserError(
                f"{path}: {name!r} is stored as {tensor.type}, which gguf does not decode; give a file in "
                "another type, such as the model's BF16"
            )
        axes = 3 if name.endswith("_exps.weight") else None
        if not tensor.shape or 0 in tensor.shape or (axes and len(tensor.shape) != axes):
            raise UserError(f"{path}: {name!r} has the shape {tensor.shape}; fetch the file again")
        if axes and tensor.shape[0] != config.experts:
            raise UserError(
                f"{path}: {name!r} has {tensor.shape[0]} experts, and its keys {config.experts}; fetch it "
                "again"
            )

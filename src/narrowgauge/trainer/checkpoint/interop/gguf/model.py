"""Writes models as GGUF files, which llama.cpp and the programs built on it read, and reads them back.

    ours                      llama (Llama, Mixtral), qwen2, qwen3, qwen3moe     gpt2
    embedding                 token_embd                                         token_embd
    position_embedding        -                                                  position_embd
    blocks.I.attention_norm   blk.I.attn_norm                                    blk.I.attn_norm
    blocks.I.qkv              attn_q, attn_k, attn_v                             attn_qkv
    blocks.I.q_norm, k_norm   attn_q_norm, attn_k_norm                           -
    blocks.I.attention_out    attn_output                                        attn_output
    blocks.I.mlp_norm         ffn_norm                                           ffn_norm
    blocks.I.gate_up          ffn_gate, ffn_up                                   -
    blocks.I.up, down         ffn_down                                           ffn_up, ffn_down
    blocks.I.experts.router   ffn_gate_inp                                       -
    .experts.J.gate_up, down  ffn_gate_exps, ffn_up_exps, ffn_down_exps          -
    norm, head                output_norm, output                                output_norm, output

Three things differ from Hugging Face's layout. `llama` rotates neighbouring elements of a head, so its rows
of q and k alternate between the halves of a head; the other architectures keep the halves. The experts of a
layer lie in one tensor (E, N, K). Scaled rotary positions are a tensor `rope_freqs` of divisors.

The values equal the forward matmul's operands in the checkpoint's step. Where ggml has a type for a cast,
its codes are stored (`container.py`); the values of other casts are stored as BF16 or F32, exactly, and a
remark names them. The head is stored where its values differ from the embedding's.

llama.cpp computes with activations in a format that belongs to the weight's type (int8 in blocks of 32 for
narrow types, BF16 for BF16), not in that of the recipe. Its graphs of gpt2 and qwen2 drop the tensor scale of
NVFP4 in the MLP, and that of llama aborts if the MLP also has biases, so these models store NVFP4
weights as values.

(Sources: ggml-org/llama.cpp, `conversion/llama.py`, `src/models/llama.cpp`, `gpt2.cpp`, `qwen2.cpp`.)
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.nn import Linear
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.gguf.container import (
    PLAIN,
    StoredRows,
    code_rows,
    library,
    plain_rows,
    read_gguf,
    type_of,
    values_of,
    write_gguf,
)
from narrowgauge.trainer.checkpoint.interop.gguf.tokenizer import tokenizer_keys
from narrowgauge.trainer.checkpoint.interop.hf_config import family_of
from narrowgauge.trainer.checkpoint.interop.huggingface import TOKENIZER_CONFIG, tokens_around_a_text
from narrowgauge.trainer.checkpoint.interop.name_map import NamePair, name_map
from narrowgauge.trainer.checkpoint.interop.quantized_weights import require_sound
from narrowgauge.trainer.data import load_tokenizer
from narrowgauge.trainer.models import ModelConfig, Transformer
from narrowgauge.trainer.models.layers import rope_frequencies, rope_shares

GGUF_FILE = "model.gguf"
ROPE_FREQUENCIES = "rope_freqs.weight"
ARCHITECTURES = {
    **{"gpt2": "gpt2", "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    "qwen3_moe": "qwen3moe",
}
#: The keys of our dimensions, after the architecture's name.
KEYS = {
    "dim": "embedding_length",
    "layers": "block_count",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ffn_dim": "feed_forward_length",
    "max_sequence_length": "context_length",
}
EXPERT_KEYS = {"experts": "expert_count", "experts_per_token": "expert_used_count"}
EXPERT_KEYS |= {"ffn_dim": "expert_feed_forward_length"}
NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"  # RMSNorm, LayerNorm
#: The architectures whose graph multiplies every layer by its tensor scale.
_SCALED = ("llama", "qwen3", "qwen3moe")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)")
_STACKED = re.compile(r"(.*_exps)\.(\d+)\.weight")


def write_gguf_model(
    path: Path,
    model: Transformer,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype | None,
    special_tokens: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a model under its recipe as one new file, and say which layers' codes no type of ggml holds.

    `weights` are float32, by our names. Those without a narrow cast are stored in `dtype`; None: in the
    narrower of bf16 and fp32 that holds the values of the forward pass exactly. `special_tokens` is the
    result of `huggingface.special_tokens_of`.
    """
    config, kept = model.config, special_tokens or {}
    arch = _architecture(config)
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    tokens = {} if loaded is None else tokens_around_a_text(loaded, kept)
    template = kept.get(TOKENIZER_CONFIG, {}).get("chat_template")
    metadata = _dimensions(config, arch) | tokenizer_keys(loaded, config.vocab_size, tokens, template)
    as_values: dict[str, list[str]] = {}
    tensors: dict[str, StoredRows] = {}
    for pair in gguf_map(config):
        stored, cast = _stored(model, pair.ours, weights[pair.ours], dtype, arch)
        if cast:
            as_values.setdefault(f"{cast} as {stored.type}", []).append(pair.ours.removesuffix(".weight"))
        is_tied = pair.ours == "head.weight" and config.tied_head
        if not is_tied or not torch.equal(values_of(stored), values_of(tensors["token_embd.weight"])):
            tensors |= _split(pair, stored, config, arch)
    if config.rope_factor != 1:
        frequencies = rope_frequencies(config, torch.device("cpu"))
        tensors[ROPE_FREQUENCIES] = plain_rows(1 / rope_shares(config, frequencies))
    write_gguf(path, metadata, dict(_written(tensors)))
    return [
        f"{len(layers)} layers of {names} ({layers[0]}, ...): GGUF holds their values, not their codes"
        for names, layers in as_values.items()
    ]


def read_gguf_model(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights in a file of this module, by our names, as float32; a tied head under both names."""
    rows, arch = read_gguf(path).tensors, _architecture(config)
    stacks = {name: _decoded(name, rows) for name in rows if name.endswith("_exps.weight")}

    def read(name: str) -> torch.Tensor:
        if match := _STACKED.fullmatch(name):
            return stacks[f"{match[1]}.weight"][int(match[2])]
        (values,) = _decoded(name, rows)
        order = _order(name, config, arch)
        return values if order is None else values[torch.from_numpy(np.argsort(order))]

    pairs = [p for p in gguf_map(config) if p.ours != "head.weight" or "output.weight" in rows]
    tensors = {pair.ours: pair.join(read, path) for pair in pairs}
    return tensors | {"head.weight": tensors.get("head.weight", tensors["embedding.weight"])}


def expected_values(
    model: Transformer, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """The values of a file of `write_gguf_model`, by our names: float32."""
    found = dict(weights)
    layers = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, Linear)}
    for name, weight in weights.items():
        values = layers[name].forward_weight().cpu() if name in layers else weight
        is_narrow = name in layers and layers[name].spec.casts["fprop.w"].is_scaled
        is_plain = dtype is not None and weight.ndim > 1 and not is_narrow
        found[name] = values.to(dtype).float() if is_plain else values
    return found


def gguf_map(config: ModelConfig) -> list[NamePair]:
    """Our tensors with their names in a file; expert J of a stack ends in `_exps.J.weight`.

    The package knows ggml's name of each of Hugging Face's.
    """
    gguf, arch = library(), ARCHITECTURES[family_of(config)]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.layers)

    def theirs(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        if match := _EXPERT.fullmatch(module):
            return f"{names.get_name(match[1] + match[3])}.{match[2]}.{parameter}"
        return f"{names.get_name(module)}.{parameter}"

    pairs = [NamePair(pair.ours, tuple(map(theirs, pair.theirs)), pair.rows) for pair in name_map(config)]
    return pairs + [NamePair("head.weight", ("output.weight",))] * config.tied_head


def _architecture(config: ModelConfig) -> str:
    """llama.cpp's architecture; a `UserError` if it computes something else."""
    arch = ARCHITECTURES[family_of(config)]
    if arch == "qwen3moe" and not config.norm_topk_prob:
        raise UserError(
            "llama.cpp lets the weights of a token's experts sum to one in qwen3moe, and this model has "
            "model.norm_topk_prob = false; use --to hf"
        )
    if arch != "llama" and config.rope_factor != 1:
        raise UserError(
            f"llama.cpp scales rotary positions as Llama 3.1 in its architecture llama alone, and this model "
            f"is {arch} with model.rope_factor = {config.rope_factor}; use --to hf"
        )
    return arch


def _dimensions(config: ModelConfig, arch: str) -> dict[str, Any]:
    """The keys of a configuration."""
    keys = KEYS | EXPERT_KEYS if config.experts else KEYS
    values = {theirs: getattr(config, ours) for ours, theirs in keys.items()}
    values |= {"vocab_size": config.vocab_size, "attention.value_length": config.head_dim}
    values["feed_forward_length"] = config.ffn_dim  # of experts under both names
    values[NORM_EPS[arch == "gpt2"]] = float(config.norm_eps)
    if arch != "gpt2":
        values |= {"rope.dimension_count": config.head_dim, "rope.freq_base": float(config.rope_theta)}
    if config.rope_factor != 1:  # without a type of scaling, llama.cpp reads `rope_freqs` alone
        values["rope.scaling.original_context_length"] = config.rope_original_positions
    general = {"architecture": arch, "type": "model", "quantization_version": 2}
    return {f"general.{k}": v for k, v in general.items()} | {f"{arch}.{k}": v for k, v in values.items()}


def _stored(
    model: Transformer, ours: str, weight: torch.Tensor, dtype: torch.dtype | None, arch: str
) -> tuple[StoredRows, str]:
    """A tensor in a type of ggml, and the name of its cast if that type does not hold the cast's codes."""
    module, _, parameter = ours.rpartition(".")
    layer = model.get_submodule(module)
    if not isinstance(layer, Linear) or parameter != "weight":
        return plain_rows(weight, dtype), ""
    cast = layer.spec.casts["fprop.w"]
    if cast.hadamard:
        raise UserError(
            f"the weights of {module!r} are multiplied after a Hadamard transform of inputs and weights "
            f"({cast.name}), which llama.cpp does not compute; use --to hf"
        )
    kind = type_of(cast, weight.shape[1]) if cast.is_scaled else None
    if kind is not None and (kind != "NVFP4" or (arch in _SCALED and not model.config.bias)):
        rows = code_rows(layer.forward_codes(), kind)
        if rows is not None:
            return rows, ""
    values = layer.forward_weight().cpu()
    return (plain_rows(values), cast.name) if cast.is_scaled else (plain_rows(values, dtype), "")


def _split(pair: NamePair, stored: StoredRows, config: ModelConfig, arch: str) -> dict[str, StoredRows]:
    """The tensors that a tensor of ours is in a file."""
    counts, found, start = pair.rows or (stored.shape[0],), {}, 0
    for name, count in zip(pair.theirs, counts, strict=True):
        order = _order(name, config, arch)
        found[name] = stored.at(start + (np.arange(count) if order is None else order))
        start += count
    return found


def _order(name: str, config: ModelConfig, arch: str) -> NDArray[np.intp] | None:
    """For each row in a file the number of ours, if they differ."""
    part = name.split(".")[-2]
    if arch != "llama" or part not in ("attn_q", "attn_k"):
        return None
    heads = config.heads if part == "attn_q" else config.kv_heads
    rows = np.arange(heads * config.head_dim).reshape(heads, 2, config.head_dim // 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def _written(tensors: Mapping[str, StoredRows]) -> Iterator[tuple[str, StoredRows]]:
    """The tensors of a file: the experts of a layer in one, in one type, and scales as tensors."""
    stacks: dict[str, list[StoredRows]] = {}
    for name, rows in tensors.items():  # experts in their order
        stacks.setdefault(stack_of(name), []).append(rows)
    for name, parts in stacks.items():
        if len({rows.type for rows in parts}) > 1:
            parts = [plain_rows(values_of(rows), torch.float32) for rows in parts]
        whole = parts[0]
        if name not in tensors:
            data = np.stack([part.data.reshape(-1) for part in parts])
            whole = StoredRows(whole.type, data, (len(parts), *whole.shape))
        yield name, whole
        if scales := [part.scale for part in parts if part.scale is not None]:
            yield scale_name(name), plain_rows(torch.tensor(scales))


def stack_of(name: str) -> str:
    """The tensor that holds one of `gguf_map`: the stack of an expert's, or itself."""
    match = _STACKED.fullmatch(name)
    return f"{match[1]}.weight" if match else name


def scale_name(name: str) -> str:
    """The tensor that holds the scale of a weight of NVFP4."""
    return name.removesuffix("weight") + "scale"


def _decoded(name: str, tensors: Mapping[str, StoredRows]) -> list[torch.Tensor]:
    """The values of a tensor, or of each expert's matrix; a `UserError` if no quantizer makes their scale."""
    rows, stored = tensors[name], tensors.get(scale_name(name)) if name.endswith("weight") else None
    q = values_of(rows)
    parts = list(q) if q.ndim == 3 else [q]
    if stored is not None and stored.shape != (len(parts),):
        raise UserError(
            f"{scale_name(name)!r} has the shape {stored.shape}, and {len(parts)} scales are read; fetch the "
            "file again"
        )
    factors = [None] * len(parts) if stored is None else values_of(stored).tolist()
    if rows.type in PLAIN and stored is None:
        return parts
    try:
        return [_scaled(part, factor, rows.type) for part, factor in zip(parts, factors, strict=True)]
    except ValueError as error:
        raise UserError(f"the weight {name!r} cannot be decoded: {error}; fetch the file again") from None


def _scaled(q: torch.Tensor, factor: float | None, kind: str) -> torch.Tensor:
    """A matrix times its tensor scale; raises `ValueError` on scales that no quantizer writes."""
    weight = q if factor is None else q * factor
    inverted = (lambda: float((q / factor).abs().max())) if factor else lambda: 0.0
    is_missing = factor is None and kind == "NVFP4"
    require_sound(q, weight, 1.0 if factor is None else factor, None if is_missing else inverted)
    return weight

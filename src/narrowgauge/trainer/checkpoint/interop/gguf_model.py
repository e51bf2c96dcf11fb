"""Models as GGUF files, which llama.cpp and the programs built on it read; written, and read of any program.

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
its codes are stored (`gguf_file.py`); the values of other casts are stored as BF16 or F32, exactly, and a
remark names them. The head is stored where its values differ from the embedding's.

llama.cpp computes with activations in a format that belongs to the weight's type (int8 in blocks of 32 for
narrow types, BF16 for BF16), not in that of the recipe. Its graphs of gpt2 and qwen2 drop the tensor scale of
NVFP4 in the MLP, and that of llama aborts if the MLP also has biases, so these models store NVFP4
weights as values.

Reading, GGUF has no key for three choices. Biases follow from the tensors that are there. A head is tied if
it is missing, or the embedding in another dtype, as the forward pass of a recipe multiplies it. The scaling
of rotary positions follows from `rope_freqs`: its largest divisor is the factor, and the rest must be that of
Llama 3.1 with 8192 original positions, or with `rope.scaling.original_context_length`. A `tokenizer.json` in
the same folder, as `export` leaves it, is the model's. Anything else that would be lost is refused: types
that gguf does not decode, tensors without a place, other scalings.

(Sources: ggml-org/llama.cpp, `conversion/llama.py`, `src/models/llama.cpp`, `gpt2.cpp`, `qwen2.cpp`.)
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowgauge.nn import Linear
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import cache_entry, make_directory
from narrowgauge.trainer.checkpoint.interop.gguf_file import (
    PLAIN,
    GgufFile,
    StoredRows,
    code_rows,
    library,
    plain_rows,
    read_gguf,
    settings_of,
    tokenizer_keys,
    tokenizer_of,
    type_of,
    values_of,
    write_gguf,
)
from narrowgauge.trainer.checkpoint.interop.hf_config import family_of
from narrowgauge.trainer.checkpoint.interop.name_map import (
    ExternalModel,
    NamePair,
    name_map,
    require_layers,
    require_tensors,
)
from narrowgauge.trainer.checkpoint.interop.quantized_weights import times_scale
from narrowgauge.trainer.data import load_tokenizer
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE
from narrowgauge.trainer.models import ModelConfig, Transformer
from narrowgauge.trainer.models.layers import rope_frequencies, rope_shares

ARCHITECTURES = {
    **{"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"},
    "gpt2": "gpt2",
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
_EXPERT_FFN = "expert_feed_forward_length"
_EXPERT_KEYS = {"experts": "expert_count", "experts_per_token": "expert_used_count", "ffn_dim": _EXPERT_FFN}
_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"  # RMSNorm, LayerNorm
_ORIGINAL = "rope.scaling.original_context_length"
_ORIGINAL_POSITIONS = 8192  # of Llama 3.1 and 3.2
_HEAD, _EMBEDDING, _FREQUENCIES = "output.weight", "token_embd.weight", "rope_freqs.weight"
#: Scales of activations, which are skipped.
_INPUT_SCALE = ".input_scale"
#: The architectures whose graph multiplies every layer by its tensor scale.
_SCALED = ("llama", "qwen3", "qwen3moe")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)")
_STACKED = re.compile(r"(.*_exps)\.(\d+)\.weight")


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
    return pairs + [NamePair("head.weight", (_HEAD,))] * config.tied_head


def _stack_of(name: str) -> str:
    """The tensor that holds one of `gguf_map`: the stack of an expert's, or itself."""
    return _STACKED.sub(r"\1.weight", name)


def _scale_name(name: str) -> str:
    """The tensor that holds the scale of a weight of NVFP4."""
    return name.removesuffix("weight") + "scale"


def _alternates(name: str, config: ModelConfig) -> bool:
    """Whether rows of the two halves of a head alternate in a tensor."""
    is_rotated = name.split(".")[-2] in ("attn_q", "attn_k")
    return is_rotated and ARCHITECTURES[family_of(config)] == "llama"


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
    config = model.config
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    metadata = _dimensions(config) | tokenizer_keys(loaded, config.vocab_size, special_tokens or {})
    as_values: dict[str, list[str]] = {}
    found: dict[str, list[StoredRows]] = {}  # one of each tensor, or one of each expert
    for pair in gguf_map(config):
        stored, cast = _stored(model, pair.ours, weights[pair.ours], dtype)
        if cast:
            as_values.setdefault(f"{cast} as {stored.type}", []).append(pair.ours.removesuffix(".weight"))
        is_tied = pair.ours == "head.weight" and config.tied_head
        if is_tied and torch.equal(values_of(stored), values_of(found[_EMBEDDING][0])):
            continue
        for name, which in pair.ranges(len(stored.data)):
            rows = stored.data[which]
            if _alternates(name, config):
                halves = rows.reshape(-1, 2, config.head_dim // 2, rows.shape[1])
                rows = halves.swapaxes(1, 2).reshape(rows.shape)
            part = replace(stored, data=rows, shape=(len(rows), *stored.shape[1:]))
            found.setdefault(_stack_of(name), []).append(part)
    tensors: dict[str, StoredRows] = {}
    for name, parts in found.items():
        tensors[name] = _stack(parts) if name.endswith("_exps.weight") else parts[0]
        if scales := [part.scale for part in parts if part.scale is not None]:
            tensors[_scale_name(name)] = plain_rows(torch.tensor(scales))
    if config.rope_factor != 1:
        frequencies = rope_frequencies(config, torch.device("cpu"))
        tensors[_FREQUENCIES] = plain_rows(1 / rope_shares(config, frequencies))
    write_gguf(path, metadata, tensors)
    return [
        f"{len(layers)} layers of {names} ({layers[0]}, ...): GGUF holds their values, not their codes"
        for names, layers in as_values.items()
    ]


def _dimensions(config: ModelConfig) -> dict[str, Any]:
    """The keys of a configuration; a `UserError` if its architecture computes something else."""
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
    keys = KEYS | _EXPERT_KEYS if config.experts else KEYS
    values = {theirs: getattr(config, ours) for ours, theirs in keys.items()}
    values |= {"vocab_size": config.vocab_size, "attention.value_length": config.head_dim}
    values[KEYS["ffn_dim"]] = config.ffn_dim  # of experts under both names
    values[_NORM_EPS[arch == "gpt2"]] = float(config.norm_eps)
    if arch != "gpt2":
        values |= {"rope.dimension_count": config.head_dim, "rope.freq_base": float(config.rope_theta)}
    if config.rope_factor != 1:  # without a type of scaling, llama.cpp reads `rope_freqs` alone
        values[_ORIGINAL] = config.rope_original_positions
    general = {"architecture": arch, "type": "model", "quantization_version": 2}
    return {f"general.{k}": v for k, v in general.items()} | {f"{arch}.{k}": v for k, v in values.items()}


def _stored(
    model: Transformer, ours: str, weight: torch.Tensor, dtype: torch.dtype | None
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
    if not cast.is_scaled:
        return plain_rows(layer.forward_weight().cpu(), dtype), ""
    kind, config = type_of(cast, weight.shape[1]), model.config
    has_scales = ARCHITECTURES[family_of(config)] in _SCALED and not config.bias
    if kind is not None and (kind != "NVFP4" or has_scales):
        rows = code_rows(layer.forward_codes(), kind)
        if rows is not None:
            return rows, ""
    return plain_rows(layer.forward_weight().cpu()), cast.name


def _stack(experts: list[StoredRows]) -> StoredRows:
    """The matrices of a layer's experts as one tensor, in one type."""
    if len({rows.type for rows in experts}) > 1:
        experts = [plain_rows(values_of(rows), torch.float32) for rows in experts]
    data = np.stack([rows.data.reshape(-1) for rows in experts])
    return StoredRows(experts[0].type, data, (len(experts), *experts[0].shape))


def expected_values(
    model: Transformer, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """The values of a file of `write_gguf_model`, by our names: float32."""
    found = {}
    layers = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, Linear)}
    for name, weight in weights.items():
        found[name] = layers[name].forward_weight().cpu() if name in layers else weight
        is_narrow = name in layers and layers[name].spec.casts["fprop.w"].is_scaled
        if dtype is not None and weight.ndim > 1 and not is_narrow:
            found[name] = found[name].to(dtype).float()
    return found


def read_gguf_external(path: Path) -> ExternalModel:
    """The model in a GGUF file: configuration, weights and tokenizer, from the file alone."""
    file = read_gguf(path)
    config = _config(file)
    require_layers(config, len(file.tensors), path)
    weights = read_gguf_model(file, config)
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{path}: the weight {name!r} is not finite; fetch the file again")
    kinds = {t.type.lower() for t in file.tensors.values() if len(t.shape) > 1}
    tokenizer = path.parent / TOKENIZER_FILE
    if not tokenizer.is_file() and (own := tokenizer_of(file.metadata)) is not None:
        tokenizer = cache_entry("tokenizers", own.digest)
        make_directory(tokenizer.parent)
        own.save(tokenizer)
    known = tokenizer if tokenizer.is_file() else None
    return ExternalModel(path, "gguf", config, weights, kinds, known, settings_of(file.metadata))


def _config(file: GgufFile) -> ModelConfig:
    tensors, arch = file.tensors, str(file.metadata.get("general.architecture", ""))
    if arch not in ARCHITECTURES.values():
        raise unknown(f"architecture of {file.path}", arch, dict.fromkeys(ARCHITECTURES.values()))
    said = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items() if k.startswith(f"{arch}.")}
    embedding = tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path} has no matrix {_EMBEDDING!r}; give a language model")
    scaling = said.get("rope.scaling.type", "none")
    if scaling not in ("none", "") or "rope.scale_linear" in said:
        raise UserError(
            f"{file.path}: rotary positions are scaled by {scaling!r}, which this model does not compute; "
            "give a model without"
        )

    def count(name: str, default: int | None = None) -> int:
        if type(value := said.get(name, default)) is not int:
            raise UserError(
                f"{file.path}: {arch}.{name} = {value!r}, and one integer is read for all layers; give "
                "another model"
            )
        return value

    def number(name: str, default: float) -> float:
        value = said.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    dim, heads = count(KEYS["dim"]), count(KEYS["heads"])
    keys = KEYS | (_EXPERT_KEYS if count("expert_count", 0) else {})
    if _EXPERT_FFN not in said:
        keys |= {"ffn_dim": KEYS["ffn_dim"]}
    defaults = {"kv_heads": heads, "head_dim": dim // max(1, heads), "experts_per_token": 2}
    common: dict[str, Any] = {ours: count(theirs, defaults.get(ours)) for ours, theirs in keys.items()}
    for name in ("attention.value_length", "rope.dimension_count"):
        if count(name, common["head_dim"]) != common["head_dim"]:
            raise UserError(
                f"{file.path}: {arch}.{name} differs from the width of a head, {common['head_dim']}, and "
                "this model has one width; give another model"
            )
    common["vocab_size"] = embedding.shape[0]
    common["tied_head"] = _HEAD not in tensors or _is_rounded(embedding, tensors[_HEAD])
    common["norm_eps"] = _decimal(number(_NORM_EPS[arch == "gpt2"], 1e-5))
    if arch == "gpt2":
        return ModelConfig(**common, positions="learned", norm="layer", mlp="gelu", bias=True)
    config = ModelConfig(
        **common,
        rope_theta=number("rope.freq_base", 10_000.0),
        bias="blk.0.attn_output.bias" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    return _with_rope(file.path, config, tensors, said.get(_ORIGINAL, _ORIGINAL_POSITIONS))


def _is_rounded(embedding: StoredRows, head: StoredRows) -> bool:
    """Whether a head is the embedding in another dtype: what a recipe multiplies of a tied one."""
    if embedding.type not in PLAIN or head.type not in PLAIN or embedding.shape != head.shape:
        return False
    return np.array_equal(plain_rows(values_of(embedding), PLAIN[head.type]).data, head.data)


def _decimal(value: float) -> float:
    """The short decimal number that a float32 was: 1e-5 is stored as 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _with_rope(
    path: Path, config: ModelConfig, tensors: Mapping[str, StoredRows], original: object
) -> ModelConfig:
    """The configuration with the scaling that `rope_freqs` holds."""
    if _FREQUENCIES not in tensors:
        return config
    divisors = values_of(tensors[_FREQUENCIES])
    factor = _decimal(float(divisors.max()))
    if type(original) is int and factor > 1 and divisors.shape == (config.head_dim // 2,):
        scaled = replace(config, rope_factor=factor, rope_original_positions=original)
        expected = 1 / rope_shares(scaled, rope_frequencies(scaled, torch.device("cpu")))
        if torch.allclose(divisors, expected, rtol=1e-5, atol=0):
            return scaled
    raise UserError(
        f"{path}: {_FREQUENCIES} is not the scaling of Llama 3.1 with {original} original positions; "
        "give the model as a Hugging Face folder, whose config.json names it"
    )


def read_gguf_model(file: GgufFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights of a configuration in a file, by our names, as float32; a tied head under both names.

    A `UserError` names a tensor that is missing, is not the model's, or cannot be decoded.
    """
    pairs = [p for p in gguf_map(config) if p.ours != "head.weight" or _HEAD in file.tensors]
    stored = [NamePair(pair.ours, tuple(map(_stack_of, pair.theirs))) for pair in pairs]
    names = {name for pair in stored for name in pair.theirs}
    optional = {_scale_name(name) for name in names} | {n for n in file.tensors if n.endswith(_INPUT_SCALE)}
    optional |= {_FREQUENCIES} if config.rope_factor != 1 else set()
    require_tensors(file.tensors, stored, optional, file.path)
    for name, tensor in file.tensors.items():
        is_stack = name.endswith("_exps.weight")
        if not tensor.shape or 0 in tensor.shape or (is_stack and len(tensor.shape) != 3):
            raise UserError(f"{file.path}: {name!r} has the shape {tensor.shape}; fetch the file again")
        if is_stack and tensor.shape[0] != config.experts:
            raise UserError(
                f"{file.path}: {name!r} has {tensor.shape[0]} experts, and its keys {config.experts}; fetch "
                "it again"
            )
    stacks = {name: _decoded(name, file) for name in names if name.endswith("_exps.weight")}

    def read(name: str) -> torch.Tensor:
        if match := _STACKED.fullmatch(name):
            return stacks[_stack_of(name)][int(match[2])]
        (values,) = _decoded(name, file)
        if _alternates(name, config):
            return values.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return values

    tensors = {pair.ours: pair.join(read, file.path) for pair in pairs}
    return tensors | {"head.weight": tensors.get("head.weight", tensors["embedding.weight"])}


def _decoded(name: str, file: GgufFile) -> list[torch.Tensor]:
    """The values of a tensor, or of each expert's matrix; a `UserError` if no quantizer makes their scale."""
    rows, scale = file.tensors[name], None
    if name.endswith("weight"):
        scale = file.tensors.get(_scale_name(name))
    try:
        q = values_of(rows)
    except NotImplementedError:
        raise UserError(
            f"{file.path}: {name!r} is stored as {rows.type}, which gguf does not decode; give a file in "
            "another type, such as the model's BF16"
        ) from None
    parts = list(q) if q.ndim == 3 else [q]
    if scale is None and rows.type in PLAIN:
        return parts
    if scale is not None and scale.shape != (len(parts),):
        raise UserError(
            f"{_scale_name(name)!r} has the shape {scale.shape}, and {len(parts)} scales are read; fetch the "
            "file again"
        )
    factors = torch.ones(len(parts)) if scale is None else values_of(scale)
    lacks_scale = scale is None and rows.type == "NVFP4"
    try:
        return [times_scale(part, factor, lacks_scale) for part, factor in zip(parts, factors, strict=True)]
    except ValueError as error:
        raise UserError(f"the weight {name!r} cannot be decoded: {error}; fetch the file again") from None

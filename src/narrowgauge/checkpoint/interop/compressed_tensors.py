"""The narrow weights themselves, in the `compressed-tensors` layout that vLLM reads.

A Hugging Face folder whose `config.json` has a `quantization_config`, and for each narrow linear layer
LAYER:

    scheme                 format                   tensors of LAYER                          w =
    fp8, one scale         float-quantized          weight e4m3, weight_scale fp32 (1)        weight * scale
    fp8, a scale per row   float-quantized          weight e4m3, weight_scale fp32 (N, 1)     weight * scale
    fp8, 128x128           float-quantized          weight e4m3, weight_scale fp32            weight * scale
                                                      (ceil N/128, ceil K/128)
    mxfp8                  mxfp8-quantized          weight e4m3, weight_scale E8M0 (N, K/32)  w * 2^(s - 127)
    mxfp6-e2m3             mxfp6-pack-quantized     weight_packed (N, 3K/4), weight_scale E8M0 (N, K/32)
    mxfp4                  mxfp4-pack-quantized     weight_packed (N, K/2), weight_scale E8M0 (N, K/32)
    nvfp4, also square     nvfp4-pack-quantized     weight_packed (N, K/2), weight_scale e4m3 (N, K/16),
                                                      weight_global_scale fp32 (1)            w * s / global

Bytes: two FP4 codes, the even column low; four FP6 codes in three bytes, little-endian. (Source:
vllm-project/compressed-tensors 0.20, `compressors/` and `quantization/quant_scheme.py`.)

The numbers are exactly those of `fprop.w` in training: the fused weight is quantized, then cut into q, k
and v or gate and up. A square block of NVFP4 becomes equal scales of its rows. Activations are scaled on
the fly, a token at a time, which for a recipe with one scale a tensor is finer than what training did.
Layers that the recipe keeps wide are listed under `ignore`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.checkpoint.interop.hf_config import family_of, to_config
from narrowgauge.checkpoint.interop.huggingface import write_settings
from narrowgauge.checkpoint.interop.name_map import NamePair, name_map
from narrowgauge.checkpoint.interop.safetensors_reader import write_tensors
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.nn import Linear
from narrowgauge.quantization import Cast, QTensor, quantize

Parts = Mapping[str, torch.Tensor]  # the tensors of a layer, by the last component of their names


@dataclass(frozen=True)
class CompressionScheme:
    """How one cast is called and described there."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]


_FLOAT = {"type": "float", "symmetric": True}
_TOKEN = {"num_bits": 8, **_FLOAT, "strategy": "token", "dynamic": True}


def _fp8(strategy: str, inputs: Mapping[str, Any] = _TOKEN, **more: Any) -> CompressionScheme:
    weights = {"num_bits": 8, **_FLOAT, "strategy": strategy, "dynamic": False, **more}
    return CompressionScheme("float-quantized", weights, inputs)


def _mx(bits: int, name: str, input_bits: int) -> CompressionScheme:
    group = {**_FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    group["zp_dtype"] = "torch.uint8"
    weights = {"num_bits": bits, **group, "dynamic": False}
    return CompressionScheme(name, weights, {"num_bits": input_bits, **group, "dynamic": True})


_BLOCK_INPUTS = {"num_bits": 8, **_FLOAT, "strategy": "group", "group_size": 128, "dynamic": True}
_NVFP4 = {
    **{"num_bits": 4, **_FLOAT, "strategy": "tensor_group", "group_size": 16},
    **{"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
}
_BY_CAST = {
    ("e4m3", "fp32", None): _fp8("tensor"),
    ("e4m3", "fp32", (1, 0)): _fp8("channel"),
    ("e4m3", "fp32", (128, 128)): _fp8("block", _BLOCK_INPUTS, block_structure=[128, 128]),
    ("e4m3", "e8m0", (1, 32)): _mx(8, "mxfp8-quantized", 8),
    ("e2m3", "e8m0", (1, 32)): _mx(6, "mxfp6-pack-quantized", 8),
    ("e2m1", "e8m0", (1, 32)): _mx(4, "mxfp4-pack-quantized", 4),
}
# Its activations have a second scale for the tensor, which would have to be measured: weights alone.
_NVFP4_SCHEME = CompressionScheme("nvfp4-pack-quantized", {**_NVFP4, "dynamic": False}, {})


def write_compressed(
    folder: Path,
    model: Transformer,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype,
    shard_bytes: int,
    special_tokens: Mapping[str, Any] | None = None,
) -> None:
    """Fill an empty folder with a model under its recipe; what the recipe keeps wide is in `dtype`.

    Raises `UserError` for a recipe without narrow weights, for numbers that the layout has no name for, and
    for GPT-2, whose linear layers it does not know.
    """
    if family_of(model.config) == "gpt2":
        raise UserError(
            "compressed-tensors describes linear layers, and those of GPT-2 are Conv1D there; use --to hf"
        )
    schemes = {name: _scheme(name, cast) for name, cast in narrow_casts(model).items()}
    if not schemes:
        raise UserError("this run's recipe multiplies with no narrow weights; use --to hf")
    casts = narrow_casts(model)
    tensors: list[tuple[str, torch.Tensor]] = []
    layers: dict[str, CompressionScheme | None] = {} if "head" in schemes else {"lm_head": None}
    for counterpart in name_map(model.config):
        module = counterpart.ours.removesuffix(".weight")
        if module not in schemes or not counterpart.ours.endswith(".weight"):
            tensors += [(name, part.to(dtype)) for name, part in counterpart.split(weights[counterpart.ours])]
            if module.startswith("blocks.") and weights[counterpart.ours].ndim == 2:
                layers |= {name.removesuffix(".weight"): None for name in counterpart.theirs}
            continue
        q = quantize(weights[counterpart.ours], casts[module], rounding="nearest-even")
        for name, parts in _split(counterpart, q):
            tensors += [(f"{name}.{part}", tensor) for part, tensor in parts.items()]
            layers[name] = schemes[module]
    values = to_config(model.config) | {"quantization_config": _describe(layers)}
    write_tensors(folder, tensors, None, shard_bytes)
    write_settings(folder, values, tokenizer, dtype, special_tokens)


def narrow_casts(model: torch.nn.Module) -> dict[str, Cast]:
    """The cast of each linear layer's weight in the forward product, where it has scales."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    casts = {name: layer.spec.casts["fprop.w"] for name, layer in layers.items()}
    return {name: cast for name, cast in casts.items() if cast.is_scaled}


def _scheme(layer: str, cast: Cast) -> CompressionScheme:
    if not cast.hadamard and not cast.outliers:
        is_nvfp4 = cast.element.name == "e2m1" and cast.scale == "e4m3" and not cast.is_scaled_by_row
        if is_nvfp4 and cast.block in ((1, 16), (16, 16)):
            return _NVFP4_SCHEME
        if scheme := _BY_CAST.get((cast.element.name, cast.scale, cast.block)):
            return scheme
    raise UserError(
        f"layer {layer!r} has weights in {cast.name!r}"
        f"{' after a Hadamard transform' if cast.hadamard else ''}, for which compressed-tensors has no "
        "name; use --to hf, or a recipe whose weights are e4m3, fp8-row, fp8-128x128, mxfp8, mxfp6-e2m3, "
        "mxfp4 or nvfp4"
    )


def _split(counterpart: NamePair, q: QTensor) -> list[tuple[str, Parts]]:
    """The layers that a fused one is there, with the tensors of each."""
    rows = counterpart.rows or (q.codes.shape[0],)
    starts = [sum(rows[:i]) for i in range(len(rows))]
    parts = []
    for name, start, count in zip(counterpart.theirs, starts, rows, strict=True):
        parts.append((name.removesuffix(".weight"), _parts(q, start, start + count)))
    return parts


def _parts(q: QTensor, start: int, end: int) -> Parts:
    """The tensors of some rows."""
    bits = q.cast.element.bits
    if bits == 8:
        stored = {"weight": q.codes[start:end].view(torch.float8_e4m3fn)}
    else:
        packed = q.packed().view(q.codes.shape[0], -1)
        stored = {"weight_packed": packed[start:end]}
    if q.cast.block is None:
        return stored | {"weight_scale": (q.scales * q.tensor_scale).reshape(1)}
    height = q.cast.block[0]
    if q.scale_codes is None:
        if start % height or (end % height and end < q.codes.shape[0]):
            raise UserError(
                f"rows {start} to {end} of a fused weight cut through its blocks of {height} rows, and each "
                "block has one scale; use --to hf, or heads that make multiples of it"
            )
        return stored | {"weight_scale": q.scales[start // height : -(-end // height)]}
    scales = q.scale_codes.repeat_interleave(height, dim=0)[start:end]
    if q.cast.scale == "e8m0":
        return stored | {"weight_scale": scales}
    global_scale = (1 / q.tensor_scale).reshape(1)
    return stored | {"weight_scale": scales.view(torch.float8_e4m3fn), "weight_global_scale": global_scale}


def _describe(layers: Mapping[str, CompressionScheme | None]) -> dict[str, Any]:
    """The `quantization_config` of layers by name; None = wide."""
    kinds = []
    for scheme in layers.values():
        if scheme is not None and scheme not in kinds:
            kinds.append(scheme)
    groups = {}
    for number, scheme in enumerate(kinds):
        targets = ["Linear"] if len(kinds) == 1 else [n for n, s in layers.items() if s == scheme]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": dict(scheme.weights),
            "input_activations": dict(scheme.inputs) or None,
            "format": scheme.format,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kinds[0].format if len(kinds) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name for name, scheme in layers.items() if scheme is None],
    }

"""Writes quantized weights in the `compressed-tensors` layout that vLLM reads.

A Hugging Face folder whose `config.json` has a `quantization_config`, and for each quantized linear layer
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

The values equal the operands of the forward matmul in the checkpoint's step: the fused weight is quantized as
the layer does it, then split into q, k and v or gate and up. A square block of NVFP4 or MX becomes equal
scales of its rows. Keys of a cast that only choose codes and scales (`Consumer.SAME_LAYOUT`) do not affect
the layout. All other keys must match a cast in the table, so a key that is new in casts is refused.

Activations are described as the layout can (`activations.py`), and each difference from training is returned
as a sentence. Layers that the recipe does not quantize are listed under `ignore`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.nn import Linear
from narrowgauge.quantization import Cast, QTensor
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes import ModelPlan
from narrowgauge.recipes.describe import beside, layout_of, written
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.activations import (
    NVFP4,
    InputScale,
    differences,
    mx_group,
    rule_of,
)
from narrowgauge.trainer.checkpoint.interop.hf_config import family_of, to_config
from narrowgauge.trainer.checkpoint.interop.huggingface import write_settings
from narrowgauge.trainer.checkpoint.interop.name_map import NamePair, name_map
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import write_tensors
from narrowgauge.trainer.models import ModelConfig, Transformer

Parts = Mapping[str, torch.Tensor]  # the tensors of a layer, by the last component of their names


@dataclass(frozen=True)
class CompressionScheme:
    """The layout's name for the casts of a layer, and their description."""

    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None  # None: not quantized


Tensors = list[tuple[str, torch.Tensor]]  # with their names in the folder
Layers = dict[str, CompressionScheme | None]  # the scheme of each linear layer; None: not quantized
Arrange = Callable[[Path, Tensors, Layers], tuple[Tensors, dict[str, Any]]]  # -> and the quantization_config


def _fp8(strategy: str, **more: Any) -> CompressionScheme:
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **more,
    }
    return CompressionScheme("float-quantized", weights)


def _mx(bits: int, name: str) -> CompressionScheme:
    return CompressionScheme(name, mx_group(bits, dynamic=False))


_SQUARE = (32, 32)
_NVFP4 = CompressionScheme("nvfp4-pack-quantized", {**NVFP4, "dynamic": False})
_WEIGHTS = {
    "e4m3": _fp8("tensor"),
    "fp8-row": _fp8("channel"),
    "fp8-128x128": _fp8("block", block_structure=[128, 128]),
    "mxfp8": _mx(8, "mxfp8-quantized"),
    "mxfp6-e2m3": _mx(6, "mxfp6-pack-quantized"),
    "mxfp4": _mx(4, "mxfp4-pack-quantized"),
    "nvfp4": _NVFP4,
    "nvfp4-2d": _NVFP4,
}


def write_quantized(
    folder: Path,
    model: Transformer,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype,
    shard_bytes: int,
    special_tokens: Mapping[str, Any] | None = None,
    scales: Mapping[str, InputScale] | None = None,
    arrange: Arrange | None = None,
) -> list[str]:
    """Fill an empty folder with a model under its recipe; returns what a server computes in another way.

    Args:
        folder: The folder.
        model: The model.
        weights: Its weights, by our names.
        tokenizer: Its tokenizer.json, if there is one.
        dtype: The dtype of layers that are not quantized.
        shard_bytes: About the size of a file.
        special_tokens: The result of `huggingface.special_tokens_of`.
        scales: Those of activations, by our names of the layers (`activations.py`).
        arrange: Turns tensors and layers into another layout; None: that of this module.
    """
    tensors, layers = quantized_tensors(model, weights, dtype, scales)
    tensors, quantization = (arrange or _arrange)(folder, tensors, layers)
    write_tensors(folder, tensors, None, shard_bytes)
    values = to_config(model.config) | {"quantization_config": quantization}
    write_settings(folder, values, tokenizer, dtype, special_tokens)
    return differences(model, scales)


def quantized_tensors(
    model: Transformer,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    scales: Mapping[str, InputScale] | None = None,
) -> tuple[Tensors, Layers]:
    """The tensors of a model by their names in the layout, and the scheme of each linear layer."""
    if family_of(model.config) == "gpt2":
        raise UserError(
            "layouts of quantized weights describe linear layers, but GPT-2 has Conv1D there; use --to hf"
        )
    narrow = narrow_layers(model)
    if not narrow:
        raise UserError("this run's recipe does not quantize weights; use --to hf")
    if "head" in narrow and model.config.tied_head:
        raise UserError(
            "the head's weights are quantized, but tied to an embedding that is not: compressed-tensors "
            "can hold one of the two; use --to hf"
        )
    shapes = {name: (layer.spec.casts["fprop.w"], layer.in_features) for name, layer in narrow.items()}
    if unfit := unfit_rows(model.config, shapes):
        raise UserError(unfit)
    measured = scales or {}
    schemes = {name: _scheme(name, layer, measured.get(name)) for name, layer in narrow.items()}
    tensors: Tensors = []
    layers: Layers = {} if "head" in schemes else {"lm_head": None}
    for counterpart in name_map(model.config):
        module = counterpart.ours.removesuffix(".weight")
        if module not in schemes or not counterpart.ours.endswith(".weight"):
            tensors += [(name, part.to(dtype)) for name, part in counterpart.split(weights[counterpart.ours])]
            if module.startswith("blocks.") and weights[counterpart.ours].ndim == 2:
                layers |= {name.removesuffix(".weight"): None for name in counterpart.theirs}
            continue
        for name, parts in _split(counterpart, narrow[module].forward_codes()):
            parts = {**parts, **_input_scale(schemes[module], measured.get(module))}
            tensors += [(f"{name}.{part}", tensor) for part, tensor in parts.items()]
            layers[name] = schemes[module]
    return tensors, layers


def narrow_layers(model: torch.nn.Module) -> dict[str, Linear]:
    """The linear layers whose weight has scales in the forward matmul."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    return {name: layer for name, layer in layers.items() if layer.spec.casts["fprop.w"].is_scaled}


def unfit_rows(config: ModelConfig, layers: Mapping[str, tuple[Cast, int]]) -> str:
    """A sentence on the layers whose rows no layout of codes and scales holds; "" if there are none.

    `layers` has the cast of each layer's weight in the forward matmul, and the length of its rows.
    """
    pairs = name_map(replace(config, layers=1))
    rows = {pair.ours: pair.rows for pair in pairs}
    found = []
    for name, (cast, columns) in layers.items():
        height, width = cast.block or (0, 0)
        parts = rows[re.sub(r"^blocks\.\d+", "blocks.0", name) + ".weight"]
        is_code = cast.scale != "fp32"  # square blocks of these are stored as blocks of each row
        if is_code and width > 1 and columns % width:
            found.append(f"layer {name!r} has rows of {columns}, which end inside a block of {width}")
        elif not is_code and height > 1 and any(part % height for part in parts[:-1]):
            ends = " and ".join(f"{part:,}" for part in parts[:-1])
            found.append(
                f"layer {name!r} is stored in parts of {ends} rows and a last one, which cut through its "
                f"blocks of {height} rows"
            )
    if not found:
        return ""
    more = f" ({len(found)} layers are alike)" if len(found) > 1 else ""
    return f"{found[0]}{more}: --to compressed-tensors and modelopt cannot hold it; use --to gguf or hf"


def unfit_plan(config: ModelConfig, plan: ModelPlan) -> str:
    """`unfit_rows` of a recipe in a model, before the model is made."""
    casts = {name: plan.parts[name].casts["fprop.w"] for name in plan.outline.layers}
    shapes = {name: (cast, plan.outline.shapes[name][1]) for name, cast in casts.items() if cast.is_scaled}
    return f"export: {unfit}" if (unfit := unfit_rows(config, shapes)) else ""


def _input_scale(scheme: CompressionScheme, scale: InputScale | None) -> Parts:
    """The tensor that holds the scale of a layer's activations, if there is one."""
    if scheme.inputs is None or scheme.inputs["dynamic"] is True:
        return {}
    assert scale is not None
    decode, encode = (torch.tensor([value], dtype=torch.float32) for value in scale)
    return {"input_global_scale": encode} if scheme.inputs["dynamic"] else {"input_scale": decode}


def _scheme(name: str, layer: Linear, scale: InputScale | None) -> CompressionScheme:
    """The scheme of a layer's casts; a `UserError` if the layout cannot express the cast of its weights."""
    x, w = layer.spec.casts["fprop.x"], layer.spec.casts["fprop.w"]
    layouts = {known: layout_of(named_cast(known)) for known in _WEIGHTS}
    own = layout_of(w)
    if own.get("block") == _SQUARE and own.get("scale") == "e8m0":
        own["block"] = (1, _SQUARE[1])  # each row of a square repeats its scale
    for known, layout in layouts.items():
        if layout == own:
            rule = rule_of(x, scale)
            return replace(_WEIGHTS[known], inputs=None if rule is None else rule.described)
    keys = min((beside(w, layout) for layout in layouts.values()), key=lambda k: ("element" in k, len(k)))
    raise UserError(
        f"layer {name!r} has weights in {w.name!r} with {written(w, keys)}, which "
        f"compressed-tensors cannot express; use --to hf, or a recipe whose weights are {', '.join(layouts)}"
    )


def _split(counterpart: NamePair, q: QTensor) -> list[tuple[str, Parts]]:
    """The separate layers of a fused one, with the tensors of each."""
    rows = counterpart.rows or (q.codes.shape[0],)
    starts = [sum(rows[:i]) for i in range(len(rows))]
    parts = []
    for name, start, count in zip(counterpart.theirs, starts, rows, strict=True):
        parts.append((name.removesuffix(".weight"), _parts(q, start, start + count)))
    return parts


def _parts(q: QTensor, start: int, end: int) -> Parts:
    """The tensors of a range of rows."""
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
        return stored | {"weight_scale": q.scales[start // height : -(-end // height)]}
    scales = q.scale_codes.repeat_interleave(height, dim=0)[start:end]
    if q.cast.scale == "e8m0":
        return stored | {"weight_scale": scales}
    global_scale = (1 / q.tensor_scale).reshape(1)
    return stored | {"weight_scale": scales.view(torch.float8_e4m3fn), "weight_global_scale": global_scale}


def _arrange(_: Path, tensors: Tensors, layers: Layers) -> tuple[Tensors, dict[str, Any]]:
    """The tensors as they are, and the `quantization_config`."""
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
            "input_activations": None if scheme.inputs is None else dict(scheme.inputs),
            "format": scheme.format,
        }
    return tensors, {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kinds[0].format if len(kinds) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name for name, scheme in layers.items() if scheme is None],
    }

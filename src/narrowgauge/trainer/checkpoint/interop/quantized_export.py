"""Writes quantized weights in the layouts that vLLM and other servers read.

Both layouts are a Hugging Face folder whose `config.json` has a `quantization_config`. They hold the same
codes and scales, under the names that `quantized_weights.py` lists:

    compressed-tensors   what each layer is, for any pair of weights and activations
    modelopt             NVIDIA ModelOpt's, also for TensorRT-LLM: one algorithm for weights and activations
                         of all layers, so any other pair is refused; `hf_quant_config.json` repeats it

ModelOpt multiplies by `weight_scale_2` and `input_scale`, the reciprocals of `weight_global_scale` and
`input_global_scale`.

The values equal the operands of the forward matmul in the checkpoint's step: the fused weight is quantized as
the layer does it, then split into q, k and v or gate and up. A square block of NVFP4 or MX becomes equal
scales of its rows. Keys of a cast that only choose codes and scales (`Consumer.SAME_LAYOUT`) do not affect
the layout. All other keys must match a cast in the table, so a key that is new in casts is refused.

Activations are described as the layout can (`activations.py`), and each difference from training is returned
as a sentence. Layers that the recipe does not quantize are listed under `ignore`.

(Sources: vllm-project/compressed-tensors 0.20, `compressors/` and `quantization/quant_scheme.py`;
NVIDIA/Model-Optimizer 0.47, `export/quant_utils.py`, `export/convert_hf_config.py`.)
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from narrowgauge.nn import Linear
from narrowgauge.quantization import Cast, QTensor
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes import ModelPlan
from narrowgauge.recipes.describe import beside, layout_of, written
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.activations import (
    INPUT_SCALES,
    NVFP4,
    differences,
    float_group,
    linear_layers,
    mx_group,
    rule_of,
)
from narrowgauge.trainer.checkpoint.interop.hf_config import family_of, to_config
from narrowgauge.trainer.checkpoint.interop.huggingface import MODELOPT, write_settings
from narrowgauge.trainer.checkpoint.interop.name_map import name_map
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import write_json, write_tensors
from narrowgauge.trainer.models import ModelConfig, Transformer

Parts = dict[str, torch.Tensor]  # the tensors of a layer, by the last component of their names


class Layout(NamedTuple):
    """A cast of weights in compressed-tensors, and in ModelOpt."""

    format: str
    weights: dict[str, Any]
    algorithms: dict[object, str]  # ModelOpt's, by `dynamic` of the activations; None: wide


class Scheme(NamedTuple):
    """A layer in a layout: its weights, and the description of its activations; None if these are wide."""

    layout: Layout
    inputs: dict[str, Any] | None

    @property
    def dynamic(self) -> object:
        """Whether scales of activations are computed as the server runs; "local": of blocks; None: wide."""
        return None if self.inputs is None else self.inputs["dynamic"]


_NVFP4 = Layout("nvfp4-pack-quantized", {**NVFP4, "dynamic": False}, {None: "W4A16_NVFP4", "local": "NVFP4"})
LAYOUTS = {
    "e4m3": Layout("float-quantized", float_group("tensor"), {False: "FP8"}),
    "fp8-row": Layout("float-quantized", float_group("channel"), {True: "FP8_PER_CHANNEL_PER_TOKEN"}),
    "fp8-128x128": Layout("float-quantized", float_group("block", block_structure=[128, 128]), {}),
    "mxfp8": Layout("mxfp8-quantized", mx_group(8), {True: "MXFP8"}),
    "mxfp6-e2m3": Layout("mxfp6-pack-quantized", mx_group(6), {}),
    "mxfp4": Layout("mxfp4-pack-quantized", mx_group(4), {}),
    "nvfp4": _NVFP4,
    "nvfp4-2d": _NVFP4,
}
_SQUARE = (32, 32)
_MODELOPT_NAMES = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}
_MODELOPT_NAMES |= {"input_global_scale": "input_scale"}
_ACTIVATIONS: dict[object, str] = {
    **{None: "that are wide", True: "in dynamic scales"},
    **{False: "in one scale", "local": "in NVFP4"},
}


def write_quantized(
    folder: Path,
    model: Transformer,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype,
    special_tokens: Mapping[str, Any] | None = None,
    scales: Mapping[str, float] | None = None,
    to: str = "compressed-tensors",
) -> list[str]:
    """Fill an empty folder with a model under its recipe; returns what a server computes in another way.

    Layers that are not quantized are stored in `dtype`. `special_tokens` is the result of
    `huggingface.special_tokens_of`, and `scales` are those of activations, by our names of the layers.
    """
    narrow, measured = narrow_layers(model), scales or {}
    _require_expressible(model.config, narrow)
    schemes = {name: _scheme(name, layer, measured.get(name)) for name, layer in narrow.items()}
    tensors: list[tuple[str, torch.Tensor]] = []
    layers: dict[str, Scheme | None] = {} if "head" in schemes else {"lm_head": None}
    for pair in name_map(model.config):
        module, _, parameter = pair.ours.rpartition(".")
        if module not in schemes or parameter != "weight":
            tensors += [(name, part.to(dtype)) for name, part in pair.split(weights[pair.ours])]
            if module.startswith("blocks.") and weights[pair.ours].ndim == 2:
                layers |= dict.fromkeys(name.removesuffix(".weight") for name in pair.theirs)
            continue
        scheme, q = schemes[module], narrow[module].forward_codes()
        for name, rows in pair.ranges(len(q.codes)):
            parts, layer = _parts(q, rows.start, rows.stop), name.removesuffix(".weight")
            if scheme.dynamic in INPUT_SCALES:
                parts[INPUT_SCALES[scheme.dynamic]] = torch.tensor([measured[module]])
            tensors += [(f"{layer}.{part}", tensor) for part, tensor in parts.items()]
            layers[layer] = scheme
    if to == "modelopt":
        quantization = _in_modelopt(folder, layers)
        tensors = [_of_modelopt(name, tensor) for name, tensor in tensors]
    else:
        quantization = _in_compressed_tensors(layers)
    write_tensors(folder, tensors, None)
    values = to_config(model.config) | {"quantization_config": quantization}
    write_settings(folder, values, tokenizer, dtype, special_tokens)
    return differences(model, scales)


def narrow_layers(model: torch.nn.Module) -> dict[str, Linear]:
    """The linear layers whose weight has scales in the forward matmul."""
    layers = linear_layers(model).items()
    return {name: layer for name, layer in layers if layer.spec.casts["fprop.w"].is_scaled}


def _require_expressible(config: ModelConfig, narrow: Mapping[str, Linear]) -> None:
    """Refuse a model that neither layout can hold."""
    if family_of(config) == "gpt2":
        raise UserError(
            "layouts of quantized weights describe linear layers, but GPT-2 has Conv1D there; use --to hf"
        )
    if not narrow:
        raise UserError("this run's recipe does not quantize weights; use --to hf")
    if "head" in narrow and config.tied_head:
        raise UserError(
            "the head's weights are quantized, but tied to an embedding that is not: compressed-tensors "
            "can hold one of the two; use --to hf"
        )
    shapes = {name: (layer.spec.casts["fprop.w"], layer.in_features) for name, layer in narrow.items()}
    if unfit := unfit_rows(config, shapes):
        raise UserError(unfit)


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


def _scheme(name: str, layer: Linear, scale: float | None) -> Scheme:
    """The scheme of a layer's casts; a `UserError` if the layout cannot express the cast of its weights."""
    x, w = layer.spec.casts["fprop.x"], layer.spec.casts["fprop.w"]
    layouts = {known: layout_of(named_cast(known)) for known in LAYOUTS}
    own = layout_of(w)
    if own.get("block") == _SQUARE and own.get("scale") == "e8m0":
        own["block"] = (1, _SQUARE[1])  # each row of a square repeats its scale
    for known, layout in layouts.items():
        if layout == own:
            rule = rule_of(x, scale is not None)
            return Scheme(LAYOUTS[known], None if rule is None else rule.described)
    keys = min((beside(w, layout) for layout in layouts.values()), key=lambda k: ("element" in k, len(k)))
    raise UserError(
        f"layer {name!r} has weights in {w.name!r} with {written(w, keys)}, which "
        f"compressed-tensors cannot express; use --to hf, or a recipe whose weights are {', '.join(layouts)}"
    )


def _parts(q: QTensor, start: int, end: int) -> Parts:
    """The tensors of a range of rows."""
    if q.cast.element.bits == 8:
        stored = {"weight": q.codes[start:end].view(torch.float8_e4m3fn)}
    else:
        stored = {"weight_packed": q.packed().view(q.codes.shape[0], -1)[start:end]}
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


def _in_compressed_tensors(layers: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    kinds: list[Scheme] = []
    for scheme in layers.values():
        if scheme is not None and scheme not in kinds:
            kinds.append(scheme)
    groups = {}
    for number, scheme in enumerate(kinds):
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else [n for n, s in layers.items() if s == scheme],
            "weights": scheme.layout.weights,
            "input_activations": scheme.inputs,
            "format": scheme.layout.format,
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kinds[0].layout.format if len(kinds) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [name for name, scheme in layers.items() if scheme is None],
    }


def _in_modelopt(folder: Path, layers: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """The `quantization_config` of ModelOpt; its own file is written into the folder."""
    found: dict[str, tuple[str, Scheme]] = {}  # of each algorithm the first layer
    for name, scheme in layers.items():
        if scheme is not None:
            found.setdefault(scheme.layout.algorithms.get(scheme.dynamic, ""), (name, scheme))
    if "" in found or len(found) > 1:
        name, scheme = found.get("") or next(iter(found.values()))
        layout = scheme.layout
        known = [algorithm for layout in LAYOUTS.values() for algorithm in layout.algorithms.values()]
        raise UserError(
            f"layer {name!r} has weights of {layout.format} ({layout.weights['strategy']}) with activations "
            f"{_ACTIVATIONS[scheme.dynamic]}, and ModelOpt's layout is written for one of "
            f"{', '.join(dict.fromkeys(known))} in all layers; use --to compressed-tensors"
            + (", or --calibrate TEXT for FP8" if False in layout.algorithms else "")
        )
    ((algorithm, (_, scheme)),) = found.items()
    group = {"quant_algo": algorithm}
    if "group_size" in scheme.layout.weights:
        group["group_size"] = scheme.layout.weights["group_size"]
    wide = [name for name, scheme in layers.items() if scheme is None]
    producer = {"name": "modelopt", "version": "0.47.0"}  # by which servers recognise the layout
    details = {**group, "kv_cache_quant_algo": None, "exclude_modules": wide}
    write_json(folder / MODELOPT, {"producer": producer, "quantization": details})
    return {"quant_method": "modelopt", **group, "ignore": wide, "producer": producer}


def _of_modelopt(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The name and value in ModelOpt's layout of a tensor in that of compressed-tensors."""
    layer, _, part = name.rpartition(".")
    if part.endswith("_global_scale"):
        tensor = 1 / tensor
    if part.endswith("scale") and tensor.dtype == torch.float32:
        tensor = tensor.reshape(-1) if tensor.numel() > 1 else tensor.reshape(())
    return f"{layer}.{_MODELOPT_NAMES.get(part, part)}", tensor

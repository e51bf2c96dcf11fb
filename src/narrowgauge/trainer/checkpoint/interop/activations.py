"""Activations in a folder of compressed-tensors, and how that differs from training.

    fprop.x in training      in the folder, for its server                       a scale in the file
    NVFP4                    blocks of 16 under one scale (`dynamic: "local"`)   input_global_scale = 1 / s
    FP8, one scale           one fixed scale (`dynamic: false`)                  input_scale = s
    FP8, one scale           a scale per token, if none was measured             -
    FP8 per row or 1 x 128   a scale per token, or per 128 columns               -
    MXFP8, MXFP4, MXFP6      E8M0 scales of blocks of 32 (MXFP6 as MXFP8)        -

s multiplies codes: amax / 448 for FP8, amax / (6 * 448) for NVFP4. What is stored, s or 1 / s, is rounded
once from the amax, in float32: the reciprocal of the other would move some codes. The amax is that of a text,
or comes from the recipe's own memory: the history of delayed scaling, or a held amax. Without it NVFP4
activations are not quantized.

Servers round to nearest, and derive dynamic scales by other rules. A cast with the keys of `RULES` or
`MEASURED` has their codes bit for bit, except NVFP4: compressed-tensors computes the scales of its blocks in
the dtype of the activations, which moves 0.2 to 6 % of the codes in bf16. Any difference becomes a sentence
(`differences`).

(Source: vllm-project/compressed-tensors 0.20, `quantization/quant_scheme.py`, `utils/helpers.py`.)
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from narrowgauge.nn import Linear, NarrowAttention, NarrowResidual
from narrowgauge.nn.histories import AmaxHistory, HeldAmax
from narrowgauge.quantization import Cast
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes.describe import layout_of, unlike, written

_FLOAT = {"type": "float", "symmetric": True}
#: As weights of NVFP4, and how their activations are computed.
NVFP4 = {
    **{"num_bits": 4, **_FLOAT, "strategy": "tensor_group", "group_size": 16},
    **{"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
}


def float_group(strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    """FP8 under fp32 scales."""
    return {"num_bits": 8, **_FLOAT, "strategy": strategy, "dynamic": dynamic, **more}


def mx_group(bits: int, dynamic: bool = False) -> dict[str, Any]:
    """Blocks of 32 elements under E8M0 scales."""
    group = {**_FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return {"num_bits": bits, **group, "zp_dtype": "torch.uint8", "dynamic": dynamic}


class Rule(NamedTuple):
    """Activations in the layout: their description, and the cast with the server's codes."""

    described: dict[str, Any]
    cast: Cast


_TOKEN = Rule(float_group("token", dynamic=True), named_cast("fp8-row"))
#: The rule for each cast of fprop.x that the layout can express.
RULES = {
    **{"e4m3": _TOKEN, "fp8-row": _TOKEN},
    "fp8-1x128": Rule(
        {"num_bits": 8, **_FLOAT, "strategy": "group", "group_size": 128, "dynamic": True},
        named_cast("fp8-1x128"),
    ),
    "mxfp8": Rule(mx_group(8, dynamic=True), named_cast("mxfp8")),
    "mxfp6-e2m3": Rule(mx_group(8, dynamic=True), named_cast("mxfp8")),  # there are no 6 bits
    "mxfp4": Rule(mx_group(4, dynamic=True), named_cast("mxfp4").having(scale_rule="even")),
}
#: The same with a scale in the file.
MEASURED = {
    "e4m3": Rule(float_group("tensor"), named_cast("e4m3")),
    "nvfp4": Rule({**NVFP4, "dynamic": "local"}, named_cast("nvfp4")),
}
#: The tensor of a layer that holds its scale, by `dynamic` of its description.
INPUT_SCALES: dict[object, str] = {"local": "input_global_scale", False: "input_scale"}
_OF_AMAX = ("history", "history_algorithm", "margin", "refresh")


def rule_of(x: Cast, is_measured: bool) -> Rule | None:
    """The rule for a cast of fprop.x, with a scale in the file or without; None if there is none."""
    rules = (MEASURED if is_measured else RULES).items()
    return next((rule for name, rule in rules if layout_of(named_cast(name)) == layout_of(x)), None)


def needs_scale(x: Cast) -> bool:
    """Whether a scale of a cast of fprop.x can be stored."""
    return rule_of(x, is_measured=True) is not None


def scale_of_amax(x: Cast, amax: float) -> float:
    """The scale that a file of compressed-tensors stores for a cast that `needs_scale`."""
    largest, aim = torch.tensor(amax, dtype=torch.float32), _aim(x)
    return float(largest / aim if x.block is None else aim / largest)


def amax_of_scale(x: Cast, scale: float, divides: bool) -> float:
    """The largest input that a stored scale reaches; `divides` if inputs are multiplied by it."""
    return _aim(x) * scale if not divides else _aim(x) / scale if scale else math.inf


def _aim(x: Cast) -> float:
    """The magnitude to which the largest input is scaled."""
    return x.element.max if x.block is None else x.element.max * 448.0


def recorded_scale(layer: Linear) -> float | None:
    """The scale of a layer from the memory of its recipe; None without one, or before its first step."""
    x, history = layer.spec.casts["fprop.x"], layer.histories.get("fprop.x")
    if isinstance(history, HeldAmax):
        return scale_of_amax(x, float(history.held)) if float(history.held) > 0 else None
    if isinstance(history, AmaxHistory) and x.history and bool(history.entries.any()):
        return float(1 / history.scale if x.block is None else history.scale)
    return None


def differences(model: torch.nn.Module, scales: Mapping[str, float] | None) -> list[str]:
    """What a server of the folder computes in another way than training, other than the order of sums.

    `scales` are those in the file, by our names of the layers.
    """
    found: dict[str, list[str]] = {}
    for name, layer in linear_layers(model).items():
        if layer.spec.casts["fprop.x"].is_scaled:
            found.setdefault(_difference(layer, (scales or {}).get(name)), []).append(name)
    remarks = [f"inputs of {_layers(names)}: {sentence}" for sentence, names in found.items() if sentence]
    return [*remarks, *_elsewhere(model)]


def before_the_casts(model: torch.nn.Module) -> list[str]:
    """What a file of plain weights leaves out: the casts of the forward pass."""
    casts = [layer.spec.casts for layer in linear_layers(model).values()]
    if not any(cast.is_scaled for of in casts for place, cast in of.items() if "fprop" in place):
        return _elsewhere(model)
    sentence = "weights are stored as they are before the recipe's casts, and servers multiply wide operands"
    return [sentence, *_elsewhere(model)]


def linear_layers(model: torch.nn.Module) -> dict[str, Linear]:
    """The linear layers of a converted model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def input_formats(model: torch.nn.Module) -> list[str]:
    """The names of the narrow casts of inputs in training."""
    casts = [layer.spec.casts["fprop.x"] for layer in linear_layers(model).values()]
    return sorted({cast.name for cast in casts if cast.is_scaled})


def in_llama_cpp(model: torch.nn.Module) -> list[str]:
    """What llama.cpp computes differently from training."""
    names = input_formats(model)
    if not names:
        return _elsewhere(model)
    sentence = (
        f"inputs were {' and '.join(names)} in training, and llama.cpp rounds them to int8 in blocks "
        "of 32 where weights are narrow, and to the weights' format elsewhere"
    )
    return [sentence, *_elsewhere(model)]


def _difference(layer: Linear, scale: float | None) -> str:
    """How a layer's inputs differ; "" if they do not."""
    x = layer.spec.casts["fprop.x"]
    if not layer.spec.casts["fprop.w"].is_scaled:
        return f"{x.name} in training, and not quantized in the file, which has wide weights there"
    rule = rule_of(x, scale is not None)
    if rule is None and needs_scale(x):
        return f"{x.name} in training, and not quantized in the file without a scale (--calibrate)"
    if rule is None:
        return f"{x.name} in training, which the layout cannot express: not quantized in the file"
    parts = []
    if keys := unlike(x, rule.cast, ("name", *_OF_AMAX)):
        parts.append(f"{written(x, keys)} in training, and {written(rule.cast, keys)} in the server")
    if scale is not None and scale != recorded_scale(layer):
        parts.append(
            "one fixed scale, that of the text it was measured on; in training each batch had its own"
        )
    elif scale is not None and x.block is not None:
        parts.append("the tensor scale of training; servers compute block scales in the dtype of activations")
    return "; and ".join(parts)


def _elsewhere(model: torch.nn.Module) -> list[str]:
    found = []
    if any(isinstance(m, NarrowAttention) and not m.is_wide for m in model.modules()):
        found.append("attention multiplied narrow operands in training, and servers multiply wide ones")
    streams = [m.cast for m in model.modules() if isinstance(m, NarrowResidual) and m.cast.is_scaled]
    if streams:
        found.append(f"the residual stream was {streams[0].name} in training, and is wide in servers")
    return found


def _layers(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers ({names[0]}, ...)"

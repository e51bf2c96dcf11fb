"""Layers of a checkpoint: which tensors make up a weight, in which layout, and what a sample of it holds.

A weight is a tensor of codes with others, whose names begin with its own:

    X.weight, X.weight_packed, X._weight_qdata (torchao), X.qweight (GPTQ, AWQ), X_blocks (gpt-oss)
    X.weight_scale, _scale_inv, _scale_2, _global_scale; X.scale (GGUF, DeepSeek); X_scales (gpt-oss)
    X.input_scale, X.input_global_scale                                 of its activations

`quantized_weights.py` defines how each layout is decoded. Here only sampled rows are, as magnitudes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.checkpoint.interop.gguf.container import TYPES
from narrowgauge.checkpoint.lint.stored import BITS, Checkpoint, Stored
from narrowgauge.formats import decode, format

Floats = NDArray[np.float32]
_ELEMENT = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz"}
_SCALE_FORMAT = {"U8": "e8m0", "F8_E8M0": "e8m0", "F8_E4M3": "e4m3"}
#: What a name adds to that of the weight it belongs to, and the part that it is. Longer endings first.
_ENDINGS = {
    ".weight_global_scale": "global",
    ".input_global_scale": "input_global",
    ".activation_scale": "input",
    ".weight_scale_inv": "scale",
    ".weight_scale_2": "scale_2",
    ".weight_zero_point": "",
    ".weight_packed": "codes",
    ".weight_scale": "scale",
    ".weight_shape": "",
    ".weight_g_idx": "",
    ".input_scale": "input",
    ".scale_weight": "scale",
    ".scale_input": "input",
    "._weight_act_per_tensor_scale": "input",
    "._weight_per_tensor_scale": "scale_2",
    "._weight_zero_point": "",
    "._weight_qdata": "codes",
    "._weight_scale": "scale",
    ".weight.absmax": "absmax",
    ".weight.nested_absmax": "",
    ".weight.nested_quant_map": "",
    ".weight.quant_map": "",
    ".qweight": "codes",
    ".qzeros": "",
    ".scales": "scale",
    ".g_idx": "",
    "_scale_inv": "scale",
    "_blocks": "codes",
    "_scales": "scale",
    ".scale": "scale",
    ".weight": "codes",
}
#: The dtypes that scales have; I32 is the packed zeros and scales of integers, which are not read.
_READABLE = {"F64", "F32", "F16", "BF16", "I32", *_ELEMENT, *_SCALE_FORMAT}
_NARROW_BITS = 8
_ROWS = 16  # sampled of each tensor, evenly spaced; codes of whole rows
_SCALES = 1 << 20  # scales of a tensor that are all read; of more, evenly spaced rows
#: Where the fp16 scale of a block lies in its bytes, for the types of ggml that have one.
_FP16_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32)


@dataclass(frozen=True)
class Sample:
    """Some rows of a weight, decoded.

    Attributes:
        codes: Magnitudes of the elements, float32; NaN where a code is.
        scales: The scale of each element, or one that broadcasts; None if the layout is not decoded.
        above: The scale of the tensor that multiplies them; 1 without one.
        largest: The largest magnitude that the element's format has.
    """

    codes: Floats
    scales: Floats | None
    above: float
    largest: float

    @property
    def values(self) -> Floats | None:
        """Magnitudes of the weights."""
        return None if self.scales is None else self.codes * self.scales * np.float32(self.above)

    @property
    def inverted(self) -> Floats | None:
        """Magnitudes if the scale nearest to the tensor were stored as its reciprocal."""
        if self.scales is None:
            return None
        with np.errstate(divide="ignore"):
            if self.above != 1:
                return self.codes * self.scales / np.float32(self.above)
            return self.codes / self.scales


@dataclass
class Layer:
    """A weight with what belongs to it.

    Attributes:
        name: The layer's name, without `.weight`.
        parts: Its tensors: "codes", "scale", "scale_2", "global", "input", "input_global", "absmax".
        kind: "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int", "nf4", a type of ggml, or "wide".
    """

    name: str
    parts: dict[str, Stored] = field(default_factory=dict)
    kind: str = "wide"

    @property
    def codes(self) -> Stored:
        """The tensor with the elements."""
        return self.parts["codes"]

    @property
    def is_narrow(self) -> bool:
        """Whether the elements have at most 8 bits."""
        return self.kind != "wide"

    @property
    def role(self) -> str:
        """The last part of the name that has a letter, such as "q_proj": the same in every block."""
        return next((word for word in reversed(self.name.split(".")) if not word.isdigit()), self.name)

    def scale_shape(self) -> tuple[int, ...] | None:
        """The shape of the scales, if they are a separate tensor."""
        return self.parts["scale"].shape if "scale" in self.parts else None

    def columns(self) -> int:
        """The elements of a row."""
        last = self.codes.shape[-1] if self.codes.shape else 1
        if self.codes.dtype == "U8" and self.kind in ("nvfp4", "mxfp4"):
            return last * (16 if self.codes.shape[-1:] == (16,) and len(self.codes.shape) > 2 else 2)
        return last

    def above(self) -> float:
        """The scale of the tensor, as its layout multiplies it."""
        if "scale_2" in self.parts:
            return float(np.max(floats(self.parts["scale_2"])))
        if "global" in self.parts:
            with np.errstate(divide="ignore"):
                return float(1 / np.max(floats(self.parts["global"])))
        if self.codes.dtype in TYPES and self.kind == "NVFP4" and "scale" in self.parts:
            return float(np.max(floats(self.parts["scale"])))
        return 1.0

    def sample(self, whole: bool = False) -> Sample | None:
        """Some rows, or all; None for wide weights, and layouts with integer codes."""
        if self.codes.dtype in TYPES:
            return _sample_ggml(self, whole)
        if self.kind in ("fp8", "mxfp8"):
            return _sample_fp8(self, whole)
        if self.kind in ("nvfp4", "mxfp4") and "scale" in self.parts:
            return _sample_fp4(self, whole)
        return None


def layers_of(found: Checkpoint) -> tuple[dict[str, Layer], dict[str, dict[str, Stored]]]:
    """The layers of a checkpoint, and the scales of layers that have no weight, by the layer's name."""
    parts: dict[str, dict[str, Stored]] = {}
    for name, tensor in found.tensors.items():
        ending = next((e for e in _ENDINGS if name.endswith(e)), "")
        part = _ENDINGS.get(ending, "codes") if ending else "codes"
        base = name.removesuffix(ending)
        if part == "scale" and ending in ("_scale_inv", ".scale") and not _has_codes(base, found):
            base, part = name, "codes"  # a parameter that is called so
        if part not in ("", "codes") and tensor.dtype not in _READABLE:
            found.faults.append((name, f"scales of dtype {tensor.dtype} are in no layout"))
        elif part and tensor.elements:
            parts.setdefault(base, {})[part] = tensor
    layers = {n: Layer(n, p) for n, p in parts.items() if "codes" in p}
    for layer in layers.values():
        layer.kind = _kind(layer)
    return layers, {n: p for n, p in parts.items() if "codes" not in p}


def _has_codes(base: str, found: Checkpoint) -> bool:
    return any(base + ending in found.tensors for ending in (".weight", ".weight_packed", "_packed", ""))


def _kind(layer: Layer) -> str:
    codes, scale = layer.codes, layer.parts.get("scale")
    if codes.dtype in TYPES and codes.dtype not in BITS:  # of ggml; both have F32, F16 and BF16
        return codes.dtype
    if "absmax" in layer.parts:
        return "nf4"
    if BITS.get(codes.dtype, 0) > _NARROW_BITS and codes.dtype != "I32":
        return "wide"
    if codes.dtype in _ELEMENT:
        return "mxfp8" if scale and scale.dtype in ("U8", "F8_E8M0") else "fp8"
    if codes.dtype.startswith("F6"):
        return "mxfp6"
    if codes.dtype in ("U8", "F4") and scale:
        if scale.dtype == "F8_E4M3":
            return "nvfp4"
        if scale.dtype in ("U8", "F8_E8M0"):
            is_six = codes.dtype == "U8" and codes.shape[-1] * 4 == scale.shape[-1] * 96
            return "mxfp6" if is_six else "mxfp4"
    return "int" if scale and codes.dtype in ("I8", "I32", "U8") else "wide"


def floats(tensor: Stored, at: NDArray[np.intp] | slice | None = None) -> Floats:
    """A tensor of scales or of plain numbers as float32, in its shape; some of its rows, if given."""
    data = tensor.data if at is None else tensor.rows(at)
    match tensor.dtype:
        case "F32" | "F16" | "F64":
            numbers = np.ascontiguousarray(data).view(f"<f{BITS[tensor.dtype] // 8}").astype(np.float32)
        case "BF16":
            bits = np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16
            numbers = bits.view(np.float32)
        case "I32":
            numbers = np.ascontiguousarray(data).view("<i4").astype(np.float32)
        case _:
            numbers = _table(_SCALE_FORMAT.get(tensor.dtype, "") or _ELEMENT[tensor.dtype])[data]
    return numbers.reshape(tensor.shape) if at is None else numbers


def scale_rows(tensor: Stored, whole: bool) -> Floats:
    """All scales of a tensor, or of evenly spaced rows if there are many."""
    if whole or tensor.elements <= _SCALES:
        return floats(tensor)
    rows = tensor.elements // tensor.shape[-1]
    return floats(tensor, _spread(rows, max(_ROWS, _SCALES // tensor.shape[-1])))


@cache
def _table(name: str) -> Floats:
    """The number of each of the 256 codes of a format."""
    return decode(torch.arange(256, dtype=torch.uint8), format(name)).numpy()


def _spread(count: int, most: int) -> NDArray[np.intp]:
    """At most `most` of `count` positions, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


def _rows(tensor: Stored, whole: bool) -> NDArray[np.intp]:
    count = tensor.elements // tensor.shape[-1] if tensor.elements else 0
    return np.arange(count) if whole or not count else _spread(count, _ROWS)


def _sample_fp8(layer: Layer, whole: bool) -> Sample | None:
    codes, table = layer.codes, np.abs(_table(_ELEMENT[layer.codes.dtype]))
    if not codes.elements or not codes.shape:
        return None
    at = _rows(codes, whole)
    magnitudes = table[codes.rows(at)]
    return Sample(magnitudes, _scales_of(layer, at, codes.shape), 1.0, float(np.nanmax(table)))


def _sample_fp4(layer: Layer, whole: bool) -> Sample | None:
    codes, scale = layer.codes, layer.parts["scale"]
    if not codes.elements or codes.dtype == "F4":
        return None
    rows = scale.elements // scale.shape[-1] if scale.shape and scale.shape[-1] else 0
    if not rows or codes.data.size % rows:
        return None
    at = np.arange(rows) if whole else _spread(rows, _ROWS)
    packed = np.ascontiguousarray(codes.data.reshape(rows, -1)[at])
    magnitudes = _E2M1[np.stack((packed & 15, packed >> 4), -1).reshape(len(at), -1)]
    scales = floats(scale, at)
    if magnitudes.shape[1] % scales.shape[1]:
        return None
    spread = np.repeat(scales, magnitudes.shape[1] // scales.shape[1], 1)
    return Sample(magnitudes, spread, layer.above(), 6.0)


def _scales_of(layer: Layer, at: NDArray[np.intp], shape: tuple[int, ...]) -> Floats | None:
    """The scale of each element of some rows: of the tensor, its rows or its blocks."""
    if (scale := layer.parts.get("scale")) is None:
        return None
    numbers, columns, rows = floats(scale), shape[-1], int(np.prod(shape[:-1], dtype=np.int64))
    if numbers.size == 1:
        return numbers.reshape(1, 1)
    if numbers.size == rows:
        return numbers.reshape(rows, 1)[at]
    if numbers.ndim < 2 or (numbers.ndim != len(shape) and numbers.ndim != 2):
        return None
    flat = numbers.reshape(-1, numbers.shape[-1])
    height, width = -(-rows // flat.shape[0]), -(-columns // flat.shape[1])
    height, width = (1 << (n - 1).bit_length() for n in (height, width))  # the blocks at the ends are cut
    if -(-rows // height) != flat.shape[0] or -(-columns // width) != flat.shape[1]:
        return None
    return np.repeat(flat[at // height], width, 1)[:, :columns]


def _sample_ggml(layer: Layer, whole: bool) -> Sample | None:
    kind = layer.codes.dtype
    if kind not in ("Q8_0", "MXFP4", "NVFP4") or not layer.codes.elements:
        return None
    _, _, size = TYPES[kind]
    blocks = layer.codes.rows(_rows(layer.codes, whole)).reshape(-1, size)
    if kind == "Q8_0":
        codes = np.abs(blocks[:, 2:].view(np.int8).astype(np.float32))
        return Sample(codes, blocks[:, :2].copy().view("<f2").astype(np.float32), 1.0, 127.0)
    if kind == "MXFP4":
        nibbles = np.concatenate((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), 1)
        return Sample(_E2M1[nibbles], _table("e8m0")[blocks[:, :1]], 1.0, 6.0)
    packed = blocks[:, 4:].reshape(-1, 8)
    nibbles = np.concatenate((packed & 15, packed >> 4), 1)
    return Sample(_E2M1[nibbles], _table("e4m3")[blocks[:, :4].reshape(-1, 1)], layer.above(), 6.0)


def ggml_scales(layer: Layer, whole: bool) -> Floats | None:
    """The scales inside the blocks of a ggml type, from sampled rows; None for types without them."""
    kind = layer.codes.dtype
    if kind not in TYPES or not layer.codes.elements:
        return None
    blocks = layer.codes.rows(_rows(layer.codes, whole)).reshape(-1, TYPES[kind][2])
    if kind == "MXFP4":
        return _table("e8m0")[blocks[:, 0]]
    if kind == "NVFP4":
        return _table("e4m3")[blocks[:, :4]]
    if kind not in _FP16_AT:
        return None
    return np.stack([blocks[:, at : at + 2].copy().view("<f2")[:, 0] for at in _FP16_AT[kind]]).astype(
        np.float32
    )


def counts(layers: Iterable[Layer]) -> Mapping[str, int]:
    """The number of layers of each kind, the most frequent first."""
    found: dict[str, int] = {}
    for layer in layers:
        found[layer.kind] = found.get(layer.kind, 0) + 1
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

"""The table of formats and roundings, and the torch dtype of each format that torch can store.

Reading the table does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats.format import Format, Specials

if TYPE_CHECKING:
    import torch

#: Roundings (defined in `rounding`), and the random bits per element that the last one uses.
ROUNDINGS = ("nearest-even", "half-away", "toward-zero", "stochastic")
RANDOM_BITS = 24

_OCP8 = "OCP 8-bit Floating Point 1.0"
_MX = "OCP Microscaling Formats 1.0, section 5"
_UNIFORM = "arXiv 2606.20381; one exponent bit, whose subnormals continue the grid of its one binade"
_INT4 = "arXiv 2603.28765; integers -7 to 7: -8 is read and never written"
_UE5M3 = "arXiv 2609.02846 (UE5M3, a format of scales); top exponent as in IEEE 754, so the largest is 61440"
_FNUZ = "ONNX float8 fnuz; AMD MI300 (gfx942)"

_FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, 127, Specials.IEEE, source="IEEE 754 binary32"),
        Format("fp16", 5, 10, 15, Specials.IEEE, source="IEEE 754 binary16"),
        Format("bf16", 8, 7, 127, Specials.IEEE, source="the upper half of binary32"),
        Format("e5m2", 5, 2, 15, Specials.IEEE, source=_OCP8),
        Format("e4m3", 4, 3, 7, Specials.NAN_ONLY, source=_OCP8),
        Format("e5m2fnuz", 5, 2, 16, Specials.NEGATIVE_ZERO, source=_FNUZ),
        Format("e4m3fnuz", 4, 3, 8, Specials.NEGATIVE_ZERO, source=_FNUZ),
        Format("int8", 0, 7, 0, Specials.NONE, twos_complement=True, source=_MX),
        Format("e3m2", 3, 2, 3, Specials.NONE, source=_MX),
        Format("e2m3", 2, 3, 1, Specials.NONE, source=_MX),
        Format("e2m1", 2, 1, 1, Specials.NONE, source=_MX),
        Format("e1m2", 1, 2, 0, Specials.NONE, source=_UNIFORM),
        Format("int4", 0, 3, -2, Specials.NONE, twos_complement=True, source=_INT4),
        Format("e5m3", 5, 3, 15, Specials.IEEE, signed=False, source=_UE5M3),
        Format("e8m0", 8, 0, 127, Specials.NAN_ONLY, signed=False, zero=False, source=_MX),
    )
}

#: The name in torch of the dtype with the same codes.
_TORCH_DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3fn",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e8m0": "float8_e8m0fnu",
}

# Family names, and the formats that each stands for.
_FAMILIES = {
    "fp8": "e4m3 and e5m2",
    "fp6": "e3m2 and e2m3",
    "fp4": "e2m1",
    "mxfp8": "e4m3 and e5m2, with scales in e8m0",
    "mxfp6": "e3m2 and e2m3, with scales in e8m0",
    "mxfp4": "e2m1, with scales in e8m0",
    "mxint8": "int8, with scales in e8m0",
    "nvfp4": "e2m1, with scales in e4m3",
}


def format(name: str) -> Format:
    """The format called `name`.

    Raises:
        UserError: There is no format of that name; the message suggests the nearest.
    """
    if name not in _FORMATS:
        if name.lower() in _FAMILIES:
            raise UserError(f"unknown format {name!r}; it is a family: {_FAMILIES[name.lower()]}")
        if own := {dtype: n for n, dtype in _TORCH_DTYPES.items()}.get(name):
            raise UserError(f"unknown format {name!r}; the nearest is {own!r}")
        raise unknown("format", name, _FORMATS)
    return _FORMATS[name]


def format_names() -> list[str]:
    """Names of all formats, widest first."""
    return list(_FORMATS)


def is_in_torch(fmt: Format) -> bool:
    """Whether torch has a dtype with the same codes."""
    return fmt.name in _TORCH_DTYPES


def torch_dtype(fmt: Format) -> torch.dtype | None:
    """The torch dtype with the same bits; None where torch has no such element (FP6, FP4)."""
    import torch  # here, so that the table can be read without torch

    name = _TORCH_DTYPES.get(fmt.name)
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype

"""The table of formats and roundings, and the torch dtype of each format that torch can store.

Reading the table does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from narrowgauge.formats.format import Format, Specials
from narrowgauge.system.errors import UserError, require, unknown

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
    if isinstance(name, str) and name in _FORMATS:
        return _FORMATS[name]
    if str(name).lower() in _FAMILIES:
        raise UserError(f"unknown format {name!r}; it is a family: {_FAMILIES[str(name).lower()]}")
    if own := {dtype: n for n, dtype in _TORCH_DTYPES.items()}.get(str(name)):
        raise UserError(f"unknown format {name!r}; the nearest is {own!r}")
    raise unknown("format", name, _FORMATS)


def format_names() -> list[str]:
    """Names of all formats, widest first; registered ones follow."""
    return list(_FORMATS)


_SHIPPED = frozenset(_FORMATS)
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
#: The facts of a format in a table; `specials` is a name of `_SPECIALS`.
_FACTS = tuple(field.name for field in fields(Format) if field.name != "name")
_SPECIALS = {member.name.lower().replace("_", "-"): member for member in Specials}


def register_format(fmt: Format) -> Format:
    """Make a custom format known by its name, for this process.

    The name then stands wherever the name of an element does, as in `{"element": "e3m4", "block": 32,
    "scale": "e8m0"}`. Everything that computes with formats derives its limits from the record, so casts,
    kernels and recipes need nothing else. A recipe from a dictionary carries the facts of such a format in
    its text, so its runs resume in any process.

    Args:
        fmt: The format: a name, and bits and codes of at most a byte, with values that float32 holds.

    Returns:
        The same format.

    Raises:
        UserError: The name is taken by another format or is not a name, or a fact is out of bounds.
    """
    require("fmt", fmt, Format)
    if not _NAME.fullmatch(fmt.name):
        raise UserError(
            f"format {fmt.name!r}: a name is small letters, digits, - and _, begins with a letter, and has "
            "at most 31 of them, as in e3m4"
        )
    if fmt.name in _FAMILIES or fmt.name in _TORCH_DTYPES.values():
        raise UserError(f"format {fmt.name!r}: the name belongs to formats that ship; take another")
    return _FORMATS.setdefault(fmt.name, known_format(fmt))


def own_formats() -> list[Format]:
    """The registered formats, in the order of their registration."""
    return [fmt for name, fmt in _FORMATS.items() if name not in _SHIPPED]


def known_format(fmt: Format) -> Format:
    """A format as it is, whether registered or not."""
    if (known := _FORMATS.get(fmt.name)) is None:
        _require_bounds(fmt)
    elif format_facts(known) != format_facts(fmt):
        raise UserError(f"format {fmt.name!r}: {known!r} has this name and other facts; take another name")
    return fmt


def format_facts(fmt: Format) -> dict[str, Any]:
    """The facts that define a format, as a table of a recipe's file writes them."""
    facts = {key: getattr(fmt, key) for key in _FACTS if key not in ("source", "specials")}
    return facts | {"specials": next(name for name, member in _SPECIALS.items() if member is fmt.specials)}


def format_from_facts(name: str, facts: Mapping[str, Any]) -> Format:
    """The format that a table of a recipe's file describes; `signed`, `zero` and `specials` have defaults."""
    for key in [key for key in facts if key not in _FACTS]:
        raise unknown(f"key of [format.{name}]", key, _FACTS)
    if missing := {"exponent_bits", "mantissa_bits", "bias"} - facts.keys():
        raise UserError(
            f"[format.{name}] has no {min(missing)}; write exponent_bits, mantissa_bits and bias (IEEE 754's "
            "is 2^(exponent_bits - 1) - 1)"
        )
    if (specials := facts.get("specials", "none")) not in [*_SPECIALS]:
        raise unknown(f"specials of [format.{name}]", specials, _SPECIALS)
    return Format(name, **{**facts, "specials": _SPECIALS[specials]})


def _require_bounds(fmt: Format) -> None:
    """Refuse a format whose codes do not fit into a byte, or with which float32 cannot compute."""
    if fmt.bits > 8:
        raise UserError(f"format {fmt.name!r}: bits must be from 2 to 8, because a code is stored in a byte")
    if not fmt.zero:
        raise UserError(f"format {fmt.name!r}: zero must be True: only scales have no zero, and those ship")
    if fmt.smallest_subnormal < 2.0**-126 or fmt.max >= 2.0**127:
        raise UserError(
            f"format {fmt.name!r}: its values reach from {fmt.smallest_subnormal:g} to {fmt.max:g}, and "
            "float32, in which casts compute, has to hold them and their inverses; choose another bias"
        )


def is_in_torch(fmt: Format) -> bool:
    """Whether torch has a dtype with the same codes."""
    return fmt.name in _TORCH_DTYPES


def torch_dtype(fmt: Format) -> torch.dtype | None:
    """The torch dtype with the same bits; None where torch has no such element (FP6, FP4)."""
    import torch  # here, so that the table can be read without torch

    dtype: torch.dtype | None = getattr(torch, _TORCH_DTYPES.get(fmt.name, ""), None)
    return dtype

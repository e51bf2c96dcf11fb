"""The casts that exist, as data, and casts from the text of a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import format
from narrowgauge.quantization.cast import Cast


def _mx(name: str, element: str) -> Cast:
    return Cast(name=name, element=format(element), scale="e8m0", block=(1, 32), scale_rule="rceil")


_CASTS = {
    c.name: c
    for c in (
        Cast(name="fp32", element=format("fp32")),
        Cast(name="bf16", element=format("bf16")),
        Cast(name="fp16", element=format("fp16")),
        Cast(name="e4m3", element=format("e4m3"), scale="fp32"),
        Cast(name="e5m2", element=format("e5m2"), scale="fp32"),
        Cast(name="e4m3fnuz", element=format("e4m3fnuz"), scale="fp32"),
        Cast(name="e5m2fnuz", element=format("e5m2fnuz"), scale="fp32"),
        Cast(name="fp8-row", element=format("e4m3"), scale="fp32", block=(1, 0)),
        Cast(name="fp8-1x128", element=format("e4m3"), scale="fp32", block=(1, 128)),
        Cast(name="fp8-128x128", element=format("e4m3"), scale="fp32", block=(128, 128)),
        _mx("mxfp8", "e4m3"),
        _mx("mxfp8-e5m2", "e5m2"),
        _mx("mxfp6-e2m3", "e2m3"),
        _mx("mxfp6-e3m2", "e3m2"),
        _mx("mxfp4", "e2m1"),
        _mx("mxint8", "int8"),
        Cast(name="nvfp4", element=format("e2m1"), scale="e4m3", block=(1, 16)),
        Cast(name="nvfp4-2d", element=format("e2m1"), scale="e4m3", block=(16, 16)),
        Cast(name="fp4-row", element=format("e2m1"), scale="fp32", block=(1, 0)),
    )
}

# For state only (`state/quantized_state.py`): numbers too wide for a byte, or stretched.
_STATE_CASTS = {
    c.name: c
    for c in (
        Cast(name="fp16-scaled", element=format("fp16"), scale="fp32", power_of_two=True),
        Cast(name="bf16-split", element=format("bf16"), split=True),
        Cast(name="coat", element=format("e4m3"), scale="fp32", block=(1, 128), expand=True),
        Cast(name="dynamic8", element=format("int8"), scale="fp32", block=(1, 256), codebook="dynamic"),
        Cast(
            name="dynamic8-unsigned",
            element=format("int8"),
            scale="fp32",
            block=(1, 256),
            codebook="dynamic-unsigned",
        ),
    )
}


def cast(name: str) -> Cast:
    """The cast called `name`.

    Raises:
        UserError: No cast has that name; the sentence names the nearest.
    """
    casts = _CASTS | _STATE_CASTS
    if name not in casts:
        raise unknown("cast", name, casts)
    return casts[name]


def cast_names() -> list[str]:
    """Names of the casts that operands of products can have; state can have them, too."""
    return list(_CASTS)


def state_cast_names() -> list[str]:
    """Names of the casts that only state can have."""
    return list(_STATE_CASTS)


# The keys of a recipe's table for a cast, and the type of each value.
_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("cast", "element", "scale_rule", "rounding", "history_algorithm"), str),
    **dict.fromkeys(("hadamard", "random_bits", "history", "margin"), int),
    **dict.fromkeys(("headroom", "outliers", "estimator_k", "estimator_cap"), int | float),
    **dict.fromkeys(("power_of_two", "compensate", "expand", "prescale"), bool),
    "signs": str | list,
}
_WORDS: Mapping[object, str] = {str: "text in quotes", bool: "true or false"}


def make_cast(value: str | Mapping[str, Any]) -> Cast:
    """A cast from a recipe's text: a name, or a table `{cast = "nvfp4", rounding = "stochastic", ...}`.

    Raises:
        UserError: Unknown cast, unknown key, or values that do not go together.
    """
    if isinstance(value, str):
        return cast(value)
    for key, given in value.items():
        if key not in _KEYS:
            raise unknown("cast key", key, _KEYS)
        if not isinstance(given, _KEYS[key]) or isinstance(given, bool) != (_KEYS[key] is bool):
            words = _WORDS.get(_KEYS[key], "a number")
            raise UserError(f"cast key {key} = {given!r}, but it must be {words}")
    changes = dict(value)
    base = cast(changes.pop("cast", "(none named)"))
    if "element" in changes:
        changes["element"] = format(changes["element"])
    if isinstance(signs := changes.get("signs"), list):
        changes["signs"] = tuple(signs)
    return dataclasses.replace(base, **changes)

"""Makes casts from text: from free keys, or from names that stand for some of them.

A cast in a recipe is a table of keys (`keys.KEYS`), or a name: a shorthand for such a table. `SHORTHANDS`
holds the table of each name. A table that begins with `cast = NAME` changes some keys of that cast.

A custom function (`register_cast`) is a cast as well: any computation in torch, from a tensor to the values
of an operand. It has values and no codes, so it is always emulated, and every consumer that reads codes
(state, the wire, exporters, scaled matmuls, kernels) refuses it by the key `function`, which none of them
supports.

    ng.register_cast("bf16-twice", lambda x: x.bfloat16().to(x.dtype))
    ng.convert(model, {"fprop": {"x": "bf16-twice", "w": "bf16"}})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from narrowgauge.formats import Format, format, format_names, known_format
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.keys import KEYS, ROUNDED
from narrowgauge.system.errors import UserError, checked, unknown

if TYPE_CHECKING:
    import torch

Table = Mapping[str, Any]
Function = Callable[[Any], Any]  # of a torch.Tensor, to one
_FUNCTIONS: dict[str, Function] = {}
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")


def _mx(element: str) -> Table:
    return {"element": element, "block": 32, "scale": "e8m0"}


_NV: Table = {"element": "e2m1", "scale": "e4m3", "tensor_scale": "tensor"}
SHORTHANDS: Mapping[str, Table] = {
    "fp32": {"element": "fp32"},
    "bf16": {"element": "bf16"},
    "fp16": {"element": "fp16"},
    "e4m3": {"element": "e4m3"},
    "e5m2": {"element": "e5m2"},
    "e4m3fnuz": {"element": "e4m3fnuz"},
    "e5m2fnuz": {"element": "e5m2fnuz"},
    "fp8-row": {"element": "e4m3", "block": "row"},
    "fp8-1x128": {"element": "e4m3", "block": 128},
    "fp8-128x128": {"element": "e4m3", "block": [128, 128]},
    "mxfp8": _mx("e4m3"),
    "mxfp8-e5m2": _mx("e5m2"),
    "mxfp6-e2m3": _mx("e2m3"),
    "mxfp6-e3m2": _mx("e3m2"),
    "mxfp4": _mx("e2m1"),
    "mxint8": _mx("int8"),
    "nvfp4": {**_NV, "block": 16},
    "nvfp4-2d": {**_NV, "block": [16, 16]},
    "fp4-row": {"element": "e2m1", "block": "row"},
}

# For state only (`state/quantized_state.py`): elements wider than a byte, or expanded.
STATE_SHORTHANDS: Mapping[str, Table] = {
    "fp16-scaled": {"element": "fp16", "scale": "fp32", "power_of_two": True},
    "coat": {"element": "e4m3", "block": 128, "expand": True},
    "dynamic8": {"element": "int8", "block": 256, "codebook": "dynamic"},
    "dynamic8-unsigned": {"element": "int8", "block": 256, "codebook": "dynamic-unsigned"},
}


def cast(name: str) -> Cast:
    """The cast called `name`.

    Raises:
        UserError: There is no cast of that name; the message suggests the nearest.
    """
    if name in _CASTS:
        return _CASTS[name]
    if name in _FUNCTIONS:
        return Cast(name=name, element=format("fp32"), function=name)
    if name in format_names():
        raise UserError(
            f'unknown cast {name!r}; it is a format, which a table makes a cast: {{element = "{name}", '
            'block = 32, scale = "e8m0"}'
        )
    raise unknown("cast", name, _CASTS)


@checked
def register_cast(name: str, function: Function) -> Function:
    """Make a function a cast, whose name stands wherever the name of a cast of operands does.

    The function gets a matrix, in the dtype in which the layer computes, and returns a tensor of the same
    shape and dtype: the values that the GEMM sees. The last axis is the one that the GEMM contracts, so
    blocks along it belong to other casts. It is called without gradients, for each operand that has the
    cast. It must be a pure function of the tensor, or a resumed run would not repeat the digits.

    Args:
        name: The name, which no cast and no format has; registering a name again replaces its function.
        function: From a floating tensor to one of the same shape and dtype.

    Returns:
        The function, so that this also is a decorator's second half.

    Raises:
        UserError: The name is taken or is not a name; or the function, on small tensors in float32 and
            bfloat16, changes shape or dtype, is not the same twice, changes its argument, or makes a finite
            number of one that is not.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"cast {name!r}: a name is small letters, digits, - and _, begins with a letter, and has at most "
            "31 of them, as in mine"
        )
    if name in (*SHORTHANDS, *STATE_SHORTHANDS, *format_names()):
        raise UserError(f"cast {name!r}: a cast or a format that ships has this name; take another")
    import torch  # here, so that recipes can be read without torch

    for dtype in (torch.float32, torch.bfloat16):
        _check(name, function, dtype)
    _FUNCTIONS[name] = function
    return function


def cast_names() -> list[str]:
    """Names of the casts that GEMM operands can have; state can also have them."""
    return list(SHORTHANDS)


def state_cast_names() -> list[str]:
    """Names of the casts that only state can have."""
    return list(STATE_SHORTHANDS)


def cast_keys() -> list[str]:
    """The keys that a recipe's table for a cast may have."""
    return ["cast", *(name for name, key in KEYS.items() if key.kind != ())]


_WORDS: Mapping[object, str] = {
    str: "text in quotes",
    bool: "true or false",
    KEYS["candidates"].kind: "a list of numbers",
    KEYS["tensor_scale"].kind: '"tensor", "row", "none", or a number of columns',
    KEYS["block"].kind: '"tensor", "row", a number of columns, or [rows, columns]',
}


def is_cast_table(value: object) -> bool:
    """Whether a recipe's value is the table of one cast."""
    return isinstance(value, Mapping) and ("cast" in value or "element" in value)


def make_cast(value: str | Table | Format | Cast) -> Cast:
    """A cast from a recipe's value: a name, or a table; or from a format, or a cast as it is.

    A table changes a named cast, as in `{cast = "nvfp4", rounding = "stochastic", ...}`, or stands alone:
    `{element = "e2m1", block = 16, scale = "e5m3"}`. Without `block` the block is the tensor; without
    `scale`, narrow elements have fp32 scales, and wide ones none.
    """
    if isinstance(value, Cast):
        return value
    if isinstance(value, str):
        return cast(value)
    if isinstance(value, Format):
        known_format(value)
        scaled: dict[str, Any] = {"scale": "fp32"} if value.bits <= 8 else {}
        return _named(Cast(name=_described({"element": value, **scaled}), element=value, **scaled))
    if not isinstance(value, Mapping):
        raise UserError(
            f"cast = {value!r}: a cast is a name such as 'mxfp4', a table of keys, a Format or a Cast"
        )
    _check_keys(value)
    changes = dict(value)
    if "element" in changes and "cast" not in changes:
        fields = _fields(changes)
        return _named(Cast(name=_described(fields), **fields))
    base = cast(changes.pop("cast", "(none named)"))
    made = base.having(**_fields(changes, base))
    return made if _identity(made) == _identity(base) else _named(made.having(name=_described(made.values())))


def _identity(c: Cast) -> tuple[object, ...]:
    """The values that identify a cast, whatever its name."""
    return c.element, c.block, c.scale, c.tensor_scale


def _check_keys(table: Table) -> None:
    for key, given in table.items():
        if key not in cast_keys():
            raise unknown("cast key", key, cast_keys())
        kind = str if key == "cast" else KEYS[key].kind
        is_right = isinstance(given, kind) and isinstance(given, bool) == (kind is bool)
        if is_right and key == "candidates":
            is_right = all(type(c) in (int, float) for c in given)
        if not is_right:
            raise UserError(f"cast key {key} = {given!r}, but it must be {_WORDS.get(kind, 'a number')}")


def _fields(table: Table, base: Cast | None = None) -> dict[str, Any]:
    """The fields of a `Cast` that a table gives; a changed scale also changes what follows from it."""
    fields = dict(table)
    if "element" in fields:
        fields["element"] = format(fields["element"])
    if "block" in fields:
        fields["block"] = _block(fields["block"])
    if "tensor_scale" in fields:
        fields["tensor_scale"] = str(fields["tensor_scale"])
    for key in ("signs", "candidates"):
        if isinstance(given := fields.get(key), list):
            fields[key] = tuple(given)
    if fields.get("center_cast") and not cast(fields["center_cast"]).is_scaled:
        raise UserError(
            f"cast key center_cast = {fields['center_cast']!r}, but it must be a cast with scales; leave the "
            "key out for a mean in the precision of the tensor"
        )
    if kept := fields.get("keep_cast"):
        _require_wider(kept, fields["element"] if base is None else fields.get("element", base.element))
    if base is None and "scale" not in fields and fields["element"].bits <= 8:
        fields["scale"] = "fp32"
    if "scale" in fields:
        fields.setdefault("scale_rule", "rceil" if fields["scale"] == "e8m0" else None)
        if fields["scale"] not in ROUNDED:
            fields.setdefault("tensor_scale", "none")
    return fields


def _require_wider(kept: str, element: Format) -> None:
    """Refuse a cast for kept channels that is not wider than the cast of the rest."""
    is_wider = element.bits > 8 or cast(kept).element.bits > element.bits  # wide casts: refused elsewhere
    if cast(kept).is_for_state or not is_wider:
        raise UserError(
            f"cast key keep_cast = {kept!r}, but it must be a cast for operands that is wider than "
            f"{element.name}, such as bf16"
        )


def _block(value: Any) -> tuple[int, int] | None:
    """The block that a key `block` names."""
    match value:
        case "tensor":
            return None
        case "row":
            return 1, 0
        case int() if value > 0:
            return 1, value
        case [int() as rows, int() as columns] if rows > 0 and columns > 0 and rows is not True:
            return rows, columns
    raise UserError(f"cast key block = {value!r}, but it must be {_WORDS[KEYS['block'].kind]}")


def _described(fields: Table) -> str:
    """A name for an unnamed cast: "e2m1-1x16-e5m3"."""
    block: tuple[int, int] | None = fields.get("block")
    shape = "tensor" if block is None else "row" if block == (1, 0) else f"{block[0]}x{block[1]}"
    scale, outer = fields.get("scale", "none"), fields.get("tensor_scale", "none")
    words = [fields["element"].name] + ([] if scale == "none" else [shape, scale])
    return "-".join(words + ([] if outer == "none" else [f"per-{outer}"]))


def _named(made: Cast) -> Cast:
    """The cast, renamed to the shorthand for its element, block and scale if there is one."""
    names = (name for name in SHORTHANDS if _identity(cast(name)) == _identity(made))
    return made.having(name=next(names, made.name))


def values_of(name: str, x: torch.Tensor, axis: int) -> torch.Tensor:
    """The values that a registered function gives a matrix whose `axis` a GEMM contracts."""
    if name not in _FUNCTIONS:
        raise UserError(
            f"cast {name!r} is a function that is not registered in this process; call "
            f"narrowgauge.register_cast({name!r}, FUNCTION) first"
        )
    import torch

    if x.device.type == "meta":  # a plan counts bytes, and functions may look at numbers
        return torch.empty_like(x)
    given = x.transpose(axis, -1).contiguous()
    with torch.no_grad():
        values = _FUNCTIONS[name](given.detach())
    _require_like(name, values, given)
    return values.transpose(axis, -1)


def _check(name: str, function: Function, dtype: torch.dtype) -> None:
    import torch

    x = torch.linspace(-3.0, 3.0, 8 * 64, device="cpu").reshape(8, 64).to(dtype)
    before = x.clone()
    with torch.no_grad():
        first, second = function(x), function(before.clone())
        _require_like(name, first, x)
        if not torch.equal(x, before):
            raise UserError(f"cast {name!r}: the function changes its argument; return another tensor")
        if not torch.equal(first, second):
            raise UserError(
                f"cast {name!r}: the function gives other values for the same tensor, so a resumed run would "
                "differ; take random bits from the values or from a fixed seed"
            )
        x[0, 0] = float("nan")
        if bool(function(x).isfinite().all()):
            raise UserError(
                f"cast {name!r}: the function makes a finite number of NaN, which would hide a broken run "
                "from the guard; let NaN stay NaN"
            )


def _require_like(name: str, values: object, x: torch.Tensor) -> None:
    import torch

    if not isinstance(values, torch.Tensor):
        raise UserError(
            f"cast {name!r}: the function returns {type(values).__name__}, and a tensor is needed"
        )
    if (values.shape, values.dtype) != (x.shape, x.dtype):
        raise UserError(
            f"cast {name!r}: the function makes {values.dtype} of shape {tuple(values.shape)} from {x.dtype} "
            f"of shape {tuple(x.shape)}; return the same shape and dtype"
        )


_CASTS = {name: Cast(name=name, **_fields(t)) for name, t in {**SHORTHANDS, **STATE_SHORTHANDS}.items()}

"""Casts that are custom functions: any computation in torch, from a tensor to the values of an operand.

A recipe names such a cast as it names any other. It has values and no codes, so it is always emulated, and
every consumer that reads codes (state, the wire, exporters, scaled matmuls, kernels) refuses it by the key
`function`, which none of them implements.

    ng.register_cast("bf16-twice", lambda x: x.bfloat16().to(x.dtype))
    ng.convert(model, {"fprop": {"x": "bf16-twice", "w": "bf16"}})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import UserError

if TYPE_CHECKING:
    import torch

Function = Callable[[Any], Any]  # of a torch.Tensor, to one
_FUNCTIONS: dict[str, Function] = {}
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")


def register(name: str, function: Function, taken: Collection[str]) -> Function:
    """`named_casts.register_cast`; `taken` are the names of what ships."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"cast {name!r}: a name is small letters, digits, - and _, begins with a letter, and has at most "
            "31 of them, as in mine"
        )
    if name in taken:
        raise UserError(f"cast {name!r}: a cast or a format that ships has this name; take another")
    import torch  # here, so that recipes can be read without torch

    for dtype in (torch.float32, torch.bfloat16):
        _check(name, function, dtype)
    _FUNCTIONS[name] = function
    return function


def has_own_cast(name: str) -> bool:
    """Whether a function is registered under a name."""
    return name in _FUNCTIONS


def values_of(name: str, x: torch.Tensor, axis: int) -> torch.Tensor:
    """The values that a registered function gives a matrix whose `axis` a GEMM contracts.

    Raises:
        UserError: No function of this name is registered in this process.
    """
    if name not in _FUNCTIONS:
        raise UserError(
            f"cast {name!r} is a function that is not registered in this process; call "
            f"narrowgauge.register_cast({name!r}, FUNCTION) first"
        )
    import torch

    if x.device.type == "meta":  # a plan counts bytes, and functions may look at numbers
        return torch.empty_like(x)
    axis %= x.ndim
    is_last = axis == x.ndim - 1
    given = x if is_last else x.transpose(axis, -1).contiguous()
    with torch.no_grad():
        values = _FUNCTIONS[name](given.detach())
    _require_like(name, values, given)
    return values if is_last else values.transpose(axis, -1)


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
    if values.shape != x.shape or values.dtype != x.dtype:
        raise UserError(
            f"cast {name!r}: the function makes {values.dtype} of shape {tuple(values.shape)} from {x.dtype} "
            f"of shape {tuple(x.shape)}; return the same shape and dtype"
        )

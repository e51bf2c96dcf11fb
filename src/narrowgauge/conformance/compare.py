"""Compares one vector with a library's result: equal in every bit, or the first element that differs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from narrowgauge.conformance.vectors import Array, Vector, values

WIDE_SCALES = ("fp32", "bf16", "fp16")
Verdict = Literal["passes", "differs", "fails", "is not there"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that differs."""

    what: str  # "code", "scale" or "tensor scale"
    where: tuple[int, ...]  # its index; for a scale, that of its block
    share: float  # the share of these values that differ
    text: str  # the actual and the expected value, in a few words


@dataclass(frozen=True, slots=True)
class Result:
    """The result for one vector."""

    vector: Vector
    verdict: Verdict  # "passes", "differs", "fails" (an exception, or a wrong shape) or "is not there"
    # at most one of each kind: scales first, because codes depend on them
    differences: tuple[Difference, ...] = ()
    why: str = ""  # the exception, or what is wrong with the shape


def compare(quantize: Callable[..., Any], vector: Vector) -> Result:
    """Call a library's function with a vector and compare its result."""
    try:
        returned = quantize(vector.x.copy(), dict(vector.cast))
    except NotImplementedError:
        return Result(vector, "is not there")
    except Exception as error:  # from the library under test: part of the result
        return Result(vector, "fails", why=f"{type(error).__name__}: {error}")
    if returned is None:
        return Result(vector, "is not there")
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        return Result(vector, "fails", why="it returned no (codes, scales) or (codes, scales, tensor_scale)")
    codes, scales = (np.asarray(part) for part in returned[:2])
    if codes.size != vector.codes.size or scales.size != vector.scales.size:
        expected = f"{vector.codes.shape} and {vector.scales.shape}"
        return Result(
            vector, "fails", why=f"codes {codes.shape}, scales {scales.shape}, but {expected} are due"
        )
    is_wide = vector.cast["scale"] in WIDE_SCALES
    for name, part in (("codes", codes), *(() if is_wide else (("scales", scales),))):
        if part.dtype.kind == "f" and not (part == np.floor(part)).all():
            return Result(vector, "fails", why=f"{name} are bit patterns, and some are not whole numbers")
    found = [
        _second(vector, returned[2] if len(returned) == 3 else None),
        _of_scales(vector, scales.reshape(vector.scales.shape)),
        _of_codes(vector, codes.reshape(vector.codes.shape).astype(np.int64)),
    ]
    differences = tuple(d for d in found if d is not None)
    return Result(vector, "differs" if differences else "passes", differences)


def _second(vector: Vector, given: Any) -> Difference | None:
    if vector.tensor_scale is None:
        return None
    due = values(vector.tensor_scale, "fp32").reshape(-1)
    if given is None:
        return Difference("tensor scale", (), 1.0, "none was returned")
    return _numeric("tensor scale", np.asarray(given, np.float32).reshape(-1), due)


def _of_scales(vector: Vector, scales: Array) -> Difference | None:
    format = vector.cast["scale"]
    if format in WIDE_SCALES:
        return _numeric("scale", scales.astype(np.float32), values(vector.scales, format))
    return _codes("scale", scales.astype(np.int64), vector.scales)


def _of_codes(vector: Vector, codes: Array) -> Difference | None:
    found = _codes("code", codes, vector.codes)
    if found is None:
        return None
    if found.where[1] >= vector.x.shape[1]:  # padding added by a transform
        return found
    x = vector.x[found.where]
    return Difference(found.what, found.where, found.share, f"{found.text}, of x = {x:.9g}")


def _numeric(what: str, given: Array, due: Array) -> Difference | None:
    if given.shape != due.shape:
        return Difference(what, (), 1.0, f"{given.size} numbers, {due.size} are due")
    wrong = ~((given == due) | (np.isnan(given) & np.isnan(due)))
    return _first(what, wrong, lambda i: f"{given[i]:.9g}, due is {due[i]:.9g}")


def _codes(what: str, given: Array, due: Array) -> Difference | None:
    return _first(what, given != due, lambda i: f"{given[i]:02x}, due is {due[i]:02x}")


def _first(what: str, wrong: Array, text: Callable[[Any], str]) -> Difference | None:
    if not wrong.any():
        return None
    where: Sequence[int] = [int(i) for i in np.argwhere(wrong)[0]]
    return Difference(what, tuple(where), float(wrong.mean()), text(tuple(where)))

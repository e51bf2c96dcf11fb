"""A check: computes the same values in two ways and compares them.

same    bit for bit; all NaNs are equal. For a kernel that rounds as its reference does
near    |got - expected| <= n eps |expected| + 2^-12 max |expected|, with eps of the result's dtype. For
        sums: two orders of a sum may round to neighbouring values (eps), n times in a chain of n results;
        in fp32, a sum of 2^14 values of both signs loses less than 2^-12 of the largest
close   ||got - expected|| <= share ||expected||. For results of rounded values, where the last bit of a sum
        can change a code
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor | None]

AGREES, DIFFERS, NOT_HERE, SKIPPED = "agrees", "differs", "not here", "skipped"
_OF_SUMS = 2.0**-12


class Disagreement(Exception):
    """The two results differ; the message is a clause."""


@dataclass(frozen=True)
class Check:
    """A computation that a machine has to get right.

    Attributes:
        group: "matmuls", "kernels", "layers", "determinism", "losses", "graphs" or "collectives".
        name: What is computed.
        run: Computes it on a device and returns how close the two results are, as a clause.
        do: What to do if they differ: a sentence.
        lacks: What this machine lacks to run the check, as a clause; empty if nothing.
    """

    group: str
    name: str
    run: Callable[[torch.device], str]
    do: str
    lacks: str = ""

    @property
    def key(self) -> str:
        """The unique name of the check."""
        return f"{self.group}: {self.name}"


@dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Attributes:
        group: The group of the check.
        name: The name of the check.
        outcome: "agrees", "differs", "not here" or "skipped".
        found: How close the two results are, what went wrong, what the machine lacks, or why the check was
            skipped: a clause.
        do: What to do about it: a sentence; empty if nothing needs to be done.
        seconds: The time it took.
        traceback: The traceback of an unexpected exception.
    """

    group: str
    name: str
    outcome: str
    found: str
    do: str = ""
    seconds: float = 0.0
    traceback: str = ""


def same(got: Tensors, expected: Tensors) -> str:
    """Require equal bits.

    Raises:
        Disagreement: an element differs.
    """
    for name, a, b in _pairs(got, expected):
        is_same = a == b
        if a.dtype.is_floating_point:
            is_same = is_same & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
        _require(is_same, name)
    return "bit for bit"


def near(got: Tensors, expected: Tensors, roundings: int = 1) -> str:
    """Require equality up to the order of sums.

    Raises:
        Disagreement: an element differs by more.
    """
    worst = 0.0
    for name, a, b in _pairs(got, expected):
        eps = torch.finfo(a.dtype).eps
        wide, exact = a.double(), b.double()
        allowed = roundings * eps * exact.abs() + _OF_SUMS * exact.abs().max()
        _require((wide - exact).abs() <= allowed, name)
        worst = max(worst, float(((wide - exact).abs() / allowed.clamp_min(1e-300)).max()))
    return f"within {worst:.0%} of what rounding allows"


def close(got: Tensors, expected: Tensors, share: float) -> str:
    """Require a small distance between whole tensors.

    Raises:
        Disagreement: a tensor differs by more than `share` of its norm, or is not finite.
    """
    worst = 0.0
    for name, a, b in _pairs(got, expected):
        off = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))
        if not off <= share:
            raise Disagreement(f"{name} is off by {off:.2g} of its norm, and {share:g} is allowed")
        worst = max(worst, off)
    return f"off by {worst:.1g} of the norm, {share:g} is allowed"


def _pairs(got: Tensors, expected: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    """(name, tensor, expected tensor) on the CPU."""
    found = []
    for name, b in expected.items():
        a = got[name]
        if (a is None) != (b is None):
            raise Disagreement(f"{name} is missing in one of the two results")
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Disagreement(f"{name} is {a.dtype} {list(a.shape)} and not {b.dtype} {list(b.shape)}")
        found.append((name, a.detach().cpu(), b.detach().cpu()))
    return found


def _require(holds: Tensor, name: str) -> None:
    wrong = int((~holds).sum())
    if wrong:
        raise Disagreement(f"{wrong:,} of {holds.numel():,} values of {name} are wrong")

"""How two results of one computation are compared, tensor by tensor.

same    bit for bit; all NaNs are equal. For a kernel that rounds as its reference does
near    |got - expected| <= n eps |expected| + 2^-12 max |expected|, with eps of the result's dtype. For
        sums: two orders of a sum may round to neighbouring values (eps), n times in a chain of n results;
        in fp32, a sum of 2^14 values of both signs loses less than 2^-12 of the largest
close   ||got - expected|| <= share ||expected||. For results of rounded values, where the last bit of a sum
        can change a code
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.testing import assert_close

Tensors = Mapping[str, Tensor | None]
_OF_SUMS = 2.0**-12


def same(got: Tensors, expected: Tensors) -> None:
    """Require equal bits."""
    for name, a, b in _pairs(got, expected):
        is_same = a == b
        if a.dtype.is_floating_point:
            is_same = is_same & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
        wrong = int((~is_same).sum())
        assert not wrong, f"{wrong:,} of {a.numel():,} values of {name} are wrong"


def near(got: Tensors, expected: Tensors, roundings: int = 1) -> None:
    """Require equality up to the order of sums."""
    for name, a, b in _pairs(got, expected):
        allowed = {"rtol": roundings * torch.finfo(a.dtype).eps, "atol": _OF_SUMS * float(b.abs().max())}
        assert_close(a.double(), b.double(), **allowed, msg=lambda words, name=name: f"{name}: {words}")


def close(got: Tensors, expected: Tensors, share: float) -> None:
    """Require finite tensors at a small distance."""
    for name, a, b in _pairs(got, expected):
        off = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))
        assert off <= share, f"{name} is off by {off:.2g} of its norm, and {share:g} is allowed"


def _pairs(got: Tensors, expected: Tensors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, tensor, expected tensor) on the CPU, of one shape and dtype."""
    for name, b in expected.items():
        a = got[name]
        assert (a is None) == (b is None), f"{name} is missing in one of the two results"
        if a is not None and b is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name} is {a.dtype} {list(a.shape)}"
            yield name, a.detach().cpu(), b.detach().cpu()

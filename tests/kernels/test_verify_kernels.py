"""The checks of `bench --verify` see a kernel that is wrong."""

import pytest
import torch

from narrowgauge.bench.verify import operations
from narrowgauge.bench.verify.check import Disagreement
from narrowgauge.bench.verify.kernel_checks import kernel_checks
from narrowgauge.kernels.dispatch import use_kernels


def check(name, device):
    (found,) = [c for c in kernel_checks(device, "") if c.name == name]
    return found


NAMES = (
    "nvfp4 along axis 0",
    "SwiGLU",
    "loss with its casts, own scales",
    "loss with its casts, scales of earlier steps",
    "AdamW on msamp-o2's state",
    "attention",
)


@pytest.mark.parametrize("name", NAMES)
def test_right_ones_agree(name, device):
    assert check(name, device).run(device)


@pytest.mark.parametrize(
    ("name", "operation"), [("SwiGLU", "swiglu"), ("GELU", "gelu"), ("attention", "attend")]
)
def test_a_wrong_number_is_seen(name, operation, device, monkeypatch):
    """One number of the result is off by a thirtieth where kernels run."""
    right = getattr(operations, operation)

    def wrong(x, *others):
        y = right(x, *others)
        if not use_kernels(x):
            return y
        off = torch.ones_like(y)
        off.view(-1)[y.detach().abs().argmax()] = 1.5
        return y * off

    monkeypatch.setattr(operations, operation, wrong)
    with pytest.raises(Disagreement):
        check(name, device).run(device)

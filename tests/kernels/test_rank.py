"""The quantiles that a kernel finds are those of torch's selection, whatever the numbers."""

import pytest
import torch

from narrowgauge.kernels import emulate
from narrowgauge.quantization import emulate as emulate_in_torch
from narrowgauge.quantization import make_cast
from narrowgauge.quantization.outliers import ranked


def launch_ranked(*args):
    """The kernel is imported where its interpreter is asked for."""
    from narrowgauge.kernels.triton import rank

    return rank.launch_ranked(*args)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def special(n):
    words = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x7F7F, 0xFF7F], dtype=torch.int32)
    return words.repeat(n)[:n].to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("numbers", [normal(37, 301), special(1001), torch.full((5, 3), -2.0).bfloat16()])
def test_ranks_are_those_of_a_selection(device, numbers):
    n = numbers.numel()
    for low, high in ((0, n - 1), (n // 100, n - 1 - n // 100), (n // 2, n // 2)):
        found = launch_ranked(numbers.to(device), low, high)
        expected = ranked(numbers.float().to(device), low, high)
        assert [f.item() for f in found] == [e.item() for e in expected]
        assert not any(torch.signbit(f) and f == 0 for f in found)


def test_nan_is_the_largest(device):
    numbers = normal(500)
    numbers[7], numbers[9] = torch.nan, -torch.nan
    low, high = launch_ranked(numbers.to(device), 497, 498)
    assert low.item() == numbers.nan_to_num(-9).max().item()
    assert high.isnan()


def test_a_cast_clamps_as_without_the_kernel(device):
    x = normal(64, 96).to(device)
    clamping = make_cast({"cast": "fp4-row", "outliers": 0.99})
    for axis in (-1, 0):
        ours, scale = emulate(x, clamping, axis, torch.bfloat16)
        theirs, expected = emulate_in_torch(x, clamping, axis, torch.bfloat16)
        assert torch.equal(ours, theirs)
        assert scale is expected is None

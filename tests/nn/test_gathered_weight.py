"""A whole weight as it travelled."""

import torch

from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.quantization import cast


def test_numbers_without_a_scale_are_converted_as_they_are():
    numbers = torch.randn(4, 6).bfloat16()
    gathered = GatheredWeight(numbers, None, cast("bf16"), True)
    assert gathered.dtype == torch.float32, "so that its gradient is"
    for dtype in (torch.bfloat16, torch.float32):
        found = gathered.to(dtype) if dtype != torch.float32 else gathered.to(dtype, copy=True)
        assert type(found) is torch.Tensor
        assert torch.equal(found, numbers.to(dtype))

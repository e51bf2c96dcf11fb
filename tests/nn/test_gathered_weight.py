"""A whole weight as it travelled."""

import torch

from narrowgauge.nn.weight import GatheredWeight, WeightGather
from narrowgauge.quantization import (
    DEFAULT_CONTEXT,
    TensorShard,
    cast,
    full_axis,
    quantize_in_context,
)


def test_numbers_without_a_scale_are_converted_as_they_are():
    numbers = torch.randn(4, 6).bfloat16()
    gathered = GatheredWeight(numbers, None, cast("bf16"), True)
    assert gathered.dtype == torch.float32, "so that its gradient is"
    for dtype in (torch.bfloat16, torch.float32):
        found = gathered.to(dtype) if dtype != torch.float32 else gathered.to(dtype, copy=True)
        assert type(found) is torch.Tensor
        assert torch.equal(found, numbers.to(dtype))


class OneProcess:
    """The mesh of a weight whose only shard is the weight."""

    def size(self):
        return 1


def test_a_shard_is_quantized_once_until_its_weight_changes():
    shard, fp8 = torch.randn(8, 16), cast("e4m3")
    gather = WeightGather(fp8, shard, None, TensorShard(tuple(full_axis(n) for n in shard.shape)))

    def sent():
        (codes,), (scale, _) = gather.fsdp_pre_all_gather(OneProcess(), shard.shape, None, None, None)
        return codes, scale

    codes, scale = sent()
    assert sent()[0] is codes, "the backward pass gathers what the forward pass did"
    expected = quantize_in_context(shard, fp8, -1, DEFAULT_CONTEXT)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scale, expected.scales)
    with torch.no_grad():
        shard[0] *= -3
    changed, scale = sent()
    expected = quantize_in_context(shard, fp8, -1, DEFAULT_CONTEXT)
    assert torch.equal(changed, expected.codes)
    assert torch.equal(scale, expected.scales)
    assert not torch.equal(changed, codes)

"""The differentiable estimator: a slope for the rounding of a weight (`estimator_k`)."""

import torch

from narrowgauge.formats.rounding import exponent_bits, inverse_quantum
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.narrow import scales_of
from narrowgauge.quantization.passes.in_torch import Split


def estimator_slope(
    w: torch.Tensor, cast: Cast, axis: int, context: QuantContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """The slope of rounding at each element of a weight, float32 in the weight's shape.

    Args:
        w: The weight in high precision.
        cast: A cast with fp32 scales; its `estimator_k` and `estimator_cap` are k and the cap.
        axis: The axis that blocks lie along.
        context: The context; it has the shard if the weight is sharded.
    """
    blocks = blocks_of(w.shape, cast, axis)
    split = blocks.split(w.detach())
    t = split.float() * scales_of(Split(split, blocks, cast, axis, context)).encode
    t.abs_().clamp_(max=cast.element.max)
    t.mul_(inverse_quantum(exponent_bits(t, cast.element), cast.element, t.dtype))  # in units of d, exact
    slope = t.sub_(t.floor()).mul_(2).sub_(1).abs_()
    slope.pow_(1 / cast.estimator_k - 1).div_(cast.estimator_k).clamp_(max=cast.estimator_cap)
    return blocks.merge(slope)

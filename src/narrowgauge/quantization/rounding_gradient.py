"""A gradient through the rounding of a weight: the differentiable estimator for FP4 (arXiv 2501.17116).

The straight-through estimator says that rounding has slope 1 everywhere. On the interval of width d between
two neighbours of the grid, rounding is instead approximated by

    f(t) = d/2 (1 + sign(u) |u|^(1/k)),   u = 2 t / d - 1      t from the lower neighbour

whose slope |u|^(1/k - 1) / k multiplies the weight's gradient. It is 1/k on the grid, rises to infinity half
way between two points, where rounding jumps, and is cut at a cap.
"""

import torch

from narrowgauge.formats.rounding import exponent_bits, inverse_quantum
from narrowgauge.quantization.block_scales import scales_of
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.passes.chunks import chunks


def estimator_slope(
    w: torch.Tensor, cast: Cast, axis: int, context: QuantContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """The slope of rounding at each element of a weight, float32 in the weight's shape.

    Args:
        w: The weight in high precision.
        cast: A cast with fp32 scales; its `estimator_k` and `estimator_cap` are k and the cap.
        axis: The axis that blocks lie along.
        context: The shard that the weight is, if it is one.
    """
    blocks = blocks_of(w.shape, cast, axis)
    split = blocks.split(w.detach())
    encode = scales_of(split, blocks, cast, axis, context).encode
    slope = torch.empty(split.shape, dtype=torch.float32, device=split.device)
    for chunk in chunks(split):
        t = chunk.of(split).float() * chunk.of(encode)
        t = t.abs_().clamp_(max=cast.element.max)
        t.mul_(inverse_quantum(exponent_bits(t, cast.element), cast.element, t.dtype))  # in units of d, exact
        u = t.sub_(t.floor()).mul_(2).sub_(1).abs_()
        u.pow_(1 / cast.estimator_k - 1).div_(cast.estimator_k).clamp_(max=cast.estimator_cap)
        chunk.of(slope).copy_(u)
    return blocks.merge(slope)

"""Two passes that evaluate scales: the error of each block, and the sums that a projection needs.

On a CPU with a C compiler they run in C (`in_c`), otherwise as torch operations.
"""

import torch

from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import QuantContext
from narrowgauge.quantization.passes import in_c
from narrowgauge.quantization.passes.rounding import round_blocks
from narrowgauge.quantization.scales import Scales


def block_errors(
    split: torch.Tensor,
    blocks: Blocks,
    axis: int,
    scales: Scales,
    over: torch.Tensor | None,
    cast: Cast,
    context: QuantContext,
) -> torch.Tensor:
    """The error of each block under given scales, by the cast's criterion, inner dimensions kept with size 1.

    In TransformerEngine's order: in float32, along each row from left to right, then pairwise halves of rows.
    """
    contracted = axis % len(blocks.size)
    is_nvfp4 = cast.has_nvfp4_scales and over is not None
    above = over if is_nvfp4 else scales.tensor
    divisor = cast.target * cast.element.max * cast.headroom if is_nvfp4 else 1.0
    if in_c.takes(split, blocks, cast, is_whole=True):
        rounding = in_c.Rounding(scales.encode, scales.divides, cast, context.random_over(blocks))
        judged = in_c.Judged(scales.block, above, divisor, cast.choose, contracted)
        return blocks.align(in_c.errors(split, blocks, rounding, judged))
    seen = round_blocks(split, blocks, scales, cast, context, "stored", torch.float32)
    if above is not None:
        seen.mul_(above)
    if is_nvfp4 and over is not None:
        seen.div_(torch.full_like(over, divisor))
    error = seen.sub_(split)
    if cast.choose == "max":
        return error.abs_().amax(blocks.inner, keepdim=True)
    error = error.abs_() if cast.choose == "mae" else error.square_()
    for dim in sorted(range(len(blocks.size)), key=lambda d: d != contracted):
        if blocks.size[dim] > 1:
            error = _sum(error, blocks.grid_dim(dim) + 1, by_halves=dim != contracted)
    return error


def projection_sums(
    split: torch.Tensor, blocks: Blocks, axis: int, scales: Scales, cast: Cast, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of t^2, of t q) of each block along the axis, added in element order, in its split shape.

    t are the values in units of their block's scale, q the same rounded; both are 0 in a block that is not
    finite or whose scale is 0.
    """
    assert cast.block is not None
    is_seen = scales.finite & (scales.block != 0)
    if cast.block[1] <= in_c.TILE and in_c.takes(split, blocks, cast, is_whole=True):
        rounding = in_c.Rounding(scales.encode, scales.divides, cast, context.random_over(blocks))
        above, below = in_c.projections(split, blocks, rounding, is_seen)
    else:
        elements = round_blocks(split, blocks, scales, cast, context, "values", torch.float32)
        numbers = split.float() / scales.encode if scales.divides else split.float() * scales.encode
        elements, numbers = (torch.where(is_seen, t, 0.0) for t in (elements, numbers))
        above, below = numbers * numbers, numbers * elements
        if cast.block[1] > 1:
            inner = blocks.grid_dim(axis % len(blocks.size)) + 1
            above, below = (in_order(t, inner) for t in (above, below))
    return above, below


def in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along a dimension, in element order."""
    return _sum(x, dim, by_halves=False)


def _sum(x: torch.Tensor, dim: int, by_halves: bool) -> torch.Tensor:
    """The sum along a dimension, in element order, or by pairwise halves while the length is even."""
    while by_halves and x.shape[dim] > 1 and x.shape[dim] % 2 == 0:
        lower, upper = x.chunk(2, dim)
        x = lower + upper
    first, *others = x.split(1, dim)
    for other in others:
        first = first + other
    return first

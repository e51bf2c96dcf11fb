"""Computes the scales of all blocks of a tensor and chooses among candidates.

Scales come from the amax of each block (`scales.py`). With `candidates`, a block is rounded once for each
candidate magnitude and keeps the scale with the least error; `correct` multiplies the scales by the factor
that makes a projection exact. Both evaluate rounding over the whole tensor (`passes/errors.py`).

A block that contains NaN or infinity gets the scale NaN: non-finite values never come out finite, even in
formats that have no code for them.
"""

import torch

from narrowgauge.formats import Randomness
from narrowgauge.formats.rounding import exponent_bits, inverse_quantum
from narrowgauge.quantization import scales
from narrowgauge.quantization.blocks import Blocks, blocks_of, chunks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.passes import in_c
from narrowgauge.quantization.passes.errors import block_errors, in_order, projection_sums
from narrowgauge.quantization.passes.rounding import block_amax
from narrowgauge.quantization.scales import Scales


def scales_of(
    split: torch.Tensor, blocks: Blocks, cast: Cast, axis: int, context: QuantContext = DEFAULT_CONTEXT
) -> Scales:
    """The scales of a split tensor's blocks; for a sharded tensor, the global one's."""
    amax = context.global_amax(block_amax(split, blocks), cast, axis)
    over = None
    if cast.tensor_scale != "none":
        by_row = cast.has_row_scales
        largest = None if by_row else in_c.largest_finite(amax)
        finite = torch.where(amax < torch.inf, amax, 0.0) if largest is None else largest
        over = context.row_amax(finite, blocks, axis, cast) if by_row else context.tensor_amax(finite)
    random = context.random_over_grid(blocks, cast, axis) if cast.scale_rounding == "stochastic" else None
    if not cast.correct:
        return _best(split, blocks, axis, amax, over, cast, context, random)
    best = _best(split, blocks, axis, amax, over, cast.uncorrected, context, None)
    return _corrected(best, split, blocks, axis, cast, context, random)


def _best(
    split: torch.Tensor,
    blocks: Blocks,
    axis: int,
    amax: torch.Tensor,
    over: torch.Tensor | None,
    cast: Cast,
    context: QuantContext,
    random: Randomness,
) -> Scales:
    """The scales of blocks: for each block, the candidate with the least error."""
    if not cast.candidates:
        return scales_from(amax, cast, context.scale, over, random)
    best: Scales | None = None
    least: torch.Tensor | None = None
    for candidate in cast.candidates:
        tried = scales_from(amax, cast, context.scale, over, random, candidate)
        error = block_errors(split, blocks, axis, tried, over, cast, context)
        if best is None or least is None:
            best, least = tried, error
            continue
        is_less = error < least
        encode, block = (torch.where(is_less, a, b) for a, b in zip(tried[:2], best[:2], strict=True))
        best, least = best._replace(encode=encode, block=block), torch.where(is_less, error, least)
    assert best is not None
    return best


def _corrected(
    found: Scales,
    split: torch.Tensor,
    blocks: Blocks,
    axis: int,
    cast: Cast,
    context: QuantContext,
    random: Randomness,
) -> Scales:
    """Scales times the factor that makes each group's projection on itself exact, rounded again."""
    assert cast.block is not None
    dim = blocks.grid_dim(axis % len(blocks.size))
    above, below = projection_sums(split, blocks, axis, found, cast, context)
    per_group = max(cast.hadamard // cast.block[1], 1)
    above, below = (in_order(t.unflatten(dim, (-1, per_group)), dim + 1) for t in (above, below))
    factor = torch.where(below == 0, 1.0, above / below)
    factor = factor.repeat_interleave(per_group, dim + 1).flatten(dim, dim + 1)
    block, _ = scales.rounded(torch.where(found.finite, found.block, 1.0) * factor, cast, random)
    return found._replace(block=torch.where(found.finite, block, torch.nan))


def scales_from(
    amax: torch.Tensor,
    cast: Cast,
    given: torch.Tensor | None = None,
    over: torch.Tensor | None = None,
    random: Randomness = None,
    candidate: float = 0.0,
) -> Scales:
    """The scales of blocks with known amaxes.

    Args:
        amax: float32, NaN or infinite where a block is not finite.
        cast: The cast.
        given: An encoding scale known in advance.
        over: The largest finite magnitude of the tensor or of each row, for casts with an outer scale.
        random: Random bits for scales that are rounded stochastically, one per block.
        candidate: The magnitude that a block's amax is mapped to; 0 for the largest element.
    """
    is_plain = given is None and random is None
    if is_plain and (found := in_c.block_scales(amax, cast, over, candidate)) is not None:
        return found
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 0.0)
    tensor_scale = None
    if given is not None:
        encode, block = given.expand_as(amax), (1.0 / given).expand_as(amax)
    elif cast.scale == "fp32":
        encode, block = scales.fp32_scale(amax, cast.element, cast.power_of_two, cast.headroom)
    elif cast.scale == "e8m0":
        assert cast.scale_rule is not None
        code = scales.e8m0_code(amax, cast.element, cast.scale_rule, cast.headroom)
        encode, block = scales.e8m0_scale(code)
    elif cast.has_nvfp4_scales:
        assert over is not None
        S, tensor_scale = scales.nvfp4_tensor_scale(over, cast)
        encode, block = scales.nvfp4_block_scale(amax, S, cast, random, candidate)
    else:
        encode, block, tensor_scale = scales.rounded_scale(amax, over, cast, random, candidate)
    divides = cast.has_rounded_scales and given is None
    return Scales(encode, torch.where(finite, block, torch.nan), tensor_scale, finite, divides)


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

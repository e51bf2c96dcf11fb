"""The two passes of quantization: the scales of all blocks, then every element to its format's grid.

Both work on a split tensor (`Blocks.split`), and walk through it in chunks (`chunks.py`), which changes no
number. Where a block may be mapped to several magnitudes (`candidates`), it is rounded with each, and keeps
the scale whose error is least.

A block that holds a NaN or an infinity gets the scale NaN: nothing non-finite ever comes out finite, also in
formats that have no code for it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from narrowgauge.formats import Randomness, RandomStream, round_finite_
from narrowgauge.quantization import scales
from narrowgauge.quantization.blocks import Blocks, amax_along
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.chunks import chunks
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext


class Scales(NamedTuple):
    """Scales of blocks, float32, inner dimensions kept with size 1.

    `tensor` is None for 1, 0-dim, or one a row, or a block, with all dimensions of the others.
    """

    encode: torch.Tensor  # what an element is multiplied by before it is rounded; divided by, if `divides`
    block: torch.Tensor  # what undoes it, without `tensor`
    tensor: torch.Tensor | None
    finite: torch.Tensor  # bool: whether the block holds finite numbers only
    divides: bool = False
    second: torch.Tensor | None = None  # bool: whether the block has the second of the cast's elements


# (values on the grid, block scales, finite) to the result; it may overwrite the values.
Epilogue = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scales_of(
    split: torch.Tensor, blocks: Blocks, cast: Cast, axis: int, context: QuantContext = DEFAULT_CONTEXT
) -> Scales:
    """The scales of a split tensor's blocks: those of the global tensor, if other processes hold some."""
    amax = context.global_amax(block_amax(split, blocks), cast, axis)
    over = None
    if cast.tensor_scale != "none":
        finite = torch.where(amax.isfinite(), amax, 0.0)
        by_row = cast.is_scaled_by_row
        over = context.row_amax(finite, blocks, axis, cast) if by_row else context.tensor_amax(finite)
    random = context.random_over_grid(blocks, cast, axis) if cast.scale_rounding == "stochastic" else None
    first = replace(cast, scale_rounding="nearest-even", correct="") if cast.correct else cast
    best = _best(split, blocks, axis, amax, over, first, context, None if cast.correct else random)
    return _corrected(best, split, blocks, axis, cast, context, random) if cast.correct else best


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
    """The scales of blocks; of several candidates those whose error is least."""
    if cast.elements:
        found = scales_from(amax, cast, context.scale, over, random)
        errors = [_error(split, blocks, axis, found, over, cast, context, n) for n in (0, 1)]
        return found._replace(second=errors[1] < errors[0])
    if not cast.candidates:
        return scales_from(amax, cast, context.scale, over, random)
    best: Scales | None = None
    least: torch.Tensor | None = None
    for candidate in cast.candidates:
        tried = scales_from(amax, cast, context.scale, over, random, candidate)
        error = _error(split, blocks, axis, tried, over, cast, context)
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
    """Scales times what makes the projection of each group's numbers on themselves exact, rounded again."""
    assert cast.block is not None
    dim = blocks.grid_dim(axis % len(blocks.size))
    elements = round_blocks(split, blocks, found, cast, context, lambda v, *_: v, torch.float32)
    numbers = split.float() / found.encode if found.divides else split.float() * found.encode
    is_seen = found.finite & (found.block != 0)
    elements, numbers = (torch.where(is_seen, t, 0.0) for t in (elements, numbers))
    above, below = numbers * numbers, numbers * elements
    if cast.block[1] > 1:
        above, below = (_sum(t, dim + 1, by_halves=False) for t in (above, below))
    per_group = max(cast.hadamard // cast.block[1], 1)
    above, below = (_sum(t.unflatten(dim, (-1, per_group)), dim + 1, False) for t in (above, below))
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
    """The scales of blocks whose largest magnitudes are known.

    Args:
        amax: float32, NaN or infinite where a block is not finite.
        cast: The cast.
        given: An encoding scale that is known beforehand.
        over: The largest finite magnitude of the tensor, or of each row, for casts with a scale above.
        random: The random bits of scales that are rounded stochastically, one for each block.
        candidate: The magnitude that the largest number of a block is mapped to; 0 for the largest element.
    """
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
    elif cast.is_nvfp4:
        assert over is not None
        S, tensor_scale = scales.nvfp4_tensor_scale(over, cast)
        encode, block = scales.nvfp4_block_scale(amax, S, cast, random, candidate)
    else:
        encode, block, tensor_scale = scales.rounded_scale(amax, over, cast, random, candidate)
    divides = cast.has_rounded_scale and given is None
    return Scales(encode, torch.where(finite, block, torch.nan), tensor_scale, finite, divides)


def _error(
    split: torch.Tensor,
    blocks: Blocks,
    axis: int,
    scales: Scales,
    over: torch.Tensor | None,
    cast: Cast,
    context: QuantContext,
    element: int = 0,
) -> torch.Tensor:
    """The error of each block under some scales, by the cast's choice, inner dimensions kept with size 1.

    In the order of TransformerEngine: in float32, along a row from left to right, then halves of rows.
    `element` is the number of one of the cast's elements.
    """

    def stored(values: torch.Tensor, block: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return values.mul_(block)

    into, back = cast.stretch if element else (1.0, 1.0)
    rounds = cast.with_second if element else cast
    seen = round_blocks(split, blocks, scales, rounds, context, stored, torch.float32, into)
    if cast.is_nvfp4 and over is not None:
        seen.mul_(over)
    elif scales.tensor is not None:
        seen.mul_(scales.tensor)
    if element:
        seen.mul_(back)
    if cast.is_nvfp4 and over is not None:
        seen.div_(torch.full_like(over, cast.target * cast.element.max * cast.headroom))
    error = seen.sub_(split)
    if cast.choose == "max":
        return error.abs_().amax(blocks.inner, keepdim=True)
    error = error.abs_() if cast.choose == "mae" else error.square_()
    contracted = axis % len(blocks.size)
    for dim in sorted(range(len(blocks.size)), key=lambda d: d != contracted):
        if blocks.size[dim] > 1:
            error = _sum(error, blocks.grid_dim(dim) + 1, by_halves=dim != contracted)
    return error


def _sum(x: torch.Tensor, dim: int, by_halves: bool) -> torch.Tensor:
    """The sum along a dimension, one number after the other, or half by half as long as that goes."""
    while by_halves and x.shape[dim] > 1 and x.shape[dim] % 2 == 0:
        lower, upper = x.chunk(2, dim)
        x = lower + upper
    first, *others = x.split(1, dim)
    for other in others:
        first = first + other
    return first


def round_elements(
    split: torch.Tensor,
    blocks: Blocks,
    scales: Scales,
    cast: Cast,
    context: QuantContext,
    epilogue_of: Callable[[Cast, float], Epilogue],
    dtype: torch.dtype,
) -> torch.Tensor:
    """`round_blocks` with the element that each block has.

    Args:
        split, blocks, scales, cast, context, dtype: As for `round_blocks`.
        epilogue_of: The epilogue for a cast with one element, and what its numbers are multiplied by.
    """
    first = round_blocks(split, blocks, scales, cast, context, epilogue_of(cast, 1.0), dtype)
    if scales.second is None:
        return first
    other, (into, back) = cast.with_second, cast.stretch
    second = round_blocks(split, blocks, scales, other, context, epilogue_of(other, back), dtype, into)
    return torch.where(scales.second, second, first)


def round_blocks(
    split: torch.Tensor,
    blocks: Blocks,
    scales: Scales,
    cast: Cast,
    context: QuantContext,
    epilogue: Epilogue,
    dtype: torch.dtype,
    stretch: float = 1.0,
) -> torch.Tensor:
    """Round every element of a split tensor, times `stretch`, to the grid.

    Returns:
        What `epilogue` makes of the rounded values, in `dtype` and the shape of `split`.
    """
    random, out = context.random_over(blocks), None
    # A torch.Generator draws in order, so all elements have to be rounded at once.
    in_order = cast.rounding == "stochastic" and not isinstance(random, RandomStream | torch.Tensor)
    for chunk in chunks(split, in_one=in_order):
        x, encode, bits = chunk.of(split), chunk.of(scales.encode), random
        if isinstance(random, RandomStream):
            bits = random.from_element(chunk.first_element(split)) if chunk.start else random
        elif isinstance(random, torch.Tensor):
            bits = chunk.of(random)
        if scales.divides:
            scaled = x / encode
        else:
            scaled = x * encode if x.dtype == torch.float32 else x.float().mul_(encode)
        if stretch != 1:
            scaled.mul_(stretch)
        values = round_finite_(scaled, cast.element, cast.rounding, bits, cast.random_bits)
        values = epilogue(values, chunk.of(scales.block), chunk.of(scales.finite))
        if x.shape == split.shape:
            return values.to(dtype)
        out = torch.empty(split.shape, dtype=dtype, device=split.device) if out is None else out
        chunk.of(out).copy_(values)
    assert out is not None
    return out


def block_amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The largest magnitude of each block of a split tensor: float32, inner dimensions kept with size 1."""
    if not blocks.inner:
        return split.float().abs()
    if split.numel() == 0:
        return blocks.align(torch.zeros(blocks.grid, device=split.device))
    amaxes, dim = [], 0
    for dim, start, size in chunks(split):
        x = split.narrow(dim, start, size)
        # A magnitude is exact in any dtype: a GPU moves half the bytes; a CPU is slow with narrow numbers.
        amax = x.abs() if x.dtype == torch.float32 or x.device.type != "cpu" else x.float().abs_()
        for inner in reversed(blocks.inner):  # one at a time, the innermost first: faster than all at once
            amax = amax_along(amax, inner)
        amaxes.append(amax.float())
    if len(amaxes) == 1:
        return amaxes[0]
    joined = torch.cat(amaxes, dim)
    return joined.amax(dim, keepdim=True) if dim in blocks.inner else joined

"""Quantization as torch operations: the reference, which the C (`in_c`) must match bit for bit.

An engine has three functions: `amax` of blocks, `narrow`, which rounds elements, and `scales` alone.
`quantization.quantize` calls the engine that supports a tensor. All engines read a `Split`.
"""

from typing import NamedTuple

import torch

from narrowgauge.formats import Randomness, RandomStream, encode_finite_, round_finite_
from narrowgauge.quantization.blocks import Blocks, chunks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import QuantContext
from narrowgauge.quantization.scales import Scales, scales_from


class Split(NamedTuple):
    """A tensor that is cut into blocks, and what is known before its elements are rounded."""

    x: torch.Tensor  # the tensor, split by its blocks
    blocks: Blocks
    cast: Cast
    axis: int  # the axis that a GEMM contracts
    context: QuantContext  # the random bits, and a scale that is given
    #: The amax of each block, float32, inner dimensions kept with size 1; None is found on the way
    amax: torch.Tensor | None = None
    #: The amax that an outer scale comes from: 0-dim, or broadcasts to `amax`
    over: torch.Tensor | None = None
    scales: Scales | None = None  # the scales; None are found on the way


#: The elements of a split tensor, in its shape; the scale of each block, inner dimensions kept with size 1,
#: which may be empty beside "stored" elements; and the outer scale (`Scales.tensor`).
Narrowed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The amax of each block of a split tensor: float32, inner dimensions kept with size 1."""
    if not blocks.inner:
        return split.float().abs()
    if split.numel() == 0:
        return blocks.align(torch.zeros(blocks.grid, dtype=torch.float32, device=split.device))
    x = split.float() if torch.compiler.is_compiling() else split  # Inductor may declare a bf16 amax twice
    return x.abs().amax(blocks.inner, keepdim=True).float()


def narrow(s: Split, result: str, dtype: torch.dtype) -> Narrowed:
    """Round every element of a split tensor to the grid, in a dtype.

    `result` is "values", the elements; "stored", the elements times their blocks' scales; or "codes", which
    are 0 in a block that is not finite.
    """
    by, _ = scales(s)
    return _rounded(s, by, result, dtype), by.block, by.tensor


def scales(s: Split, with_sums: bool = False) -> tuple[Scales, tuple[torch.Tensor, ...]]:
    """The scales of a split tensor's blocks and, on request, the sums that a projection needs.

    These are the sums of t^2 and of t q over each block along the axis, added in element order, in the shape
    of the scales. t are the values in units of their block's scale, q the same rounded; both are 0 in a block
    that is not finite or whose scale is 0.
    """
    found = amax(s.x, s.blocks) if s.amax is None and s.scales is None else s.amax
    by = best(s._replace(amax=found)) if s.scales is None else s.scales
    if not with_sums:
        return by, ()
    assert s.cast.block is not None
    is_seen = by.finite & (by.block != 0)
    elements = _rounded(s, by, "values", torch.float32)
    numbers = s.x.float() / by.encode if by.divides else s.x.float() * by.encode
    elements, numbers = (torch.where(is_seen, t, 0.0) for t in (elements, numbers))
    above, below = numbers * numbers, numbers * elements
    if s.cast.block[1] > 1:
        inner = s.blocks.grid_dim(s.axis % len(s.blocks.size)) + 1
        above, below = in_order(above, inner), in_order(below, inner)
    return by, (above, below)


def best(s: Split, random: Randomness = None) -> Scales:
    """The scales of blocks: for each block, the candidate with the least error; `random` is for scales."""
    assert s.amax is not None
    if not s.cast.candidates:
        return scales_from(s.amax, s.cast, s.context.scale, s.over, random)
    first, *others = (
        scales_from(s.amax, s.cast, s.context.scale, s.over, random, candidate)
        for candidate in s.cast.candidates
    )
    found, least = first, block_errors(s, first)
    for tried in others:
        error = block_errors(s, tried)
        is_less = error < least
        encode, block = (torch.where(is_less, a, b) for a, b in zip(tried[:2], found[:2], strict=True))
        found, least = found._replace(encode=encode, block=block), torch.where(is_less, error, least)
    return found


def block_errors(s: Split, by: Scales) -> torch.Tensor:
    """The error of each block under given scales, by the cast's criterion, inner dimensions kept with size 1.

    In TransformerEngine's order: in float32, along each row from left to right, then pairwise halves of rows.
    """
    cast, blocks, over = s.cast, s.blocks, s.over
    contracted = s.axis % len(blocks.size)
    seen = _rounded(s, by, "stored", torch.float32)
    if cast.has_nvfp4_scales and over is not None:
        seen.mul_(over).div_(torch.full_like(over, cast.target * cast.element.max * cast.headroom))
    elif by.tensor is not None:
        seen.mul_(by.tensor)
    error = seen.sub_(s.x)
    if cast.choose == "max":
        return amax(error, blocks)
    error = error.abs_() if cast.choose == "mae" else error.square_()
    for dim in sorted(range(len(blocks.size)), key=lambda d: d != contracted):
        if blocks.size[dim] > 1:
            error = in_order(error, blocks.grid_dim(dim) + 1, by_halves=dim != contracted)
    return error


def _rounded(s: Split, by: Scales, result: str, dtype: torch.dtype) -> torch.Tensor:
    """The elements, in the shape of the split tensor."""
    cast, random, done, out = s.cast, s.context.random_over(s.blocks), 0, None
    drawn = (random,) if isinstance(random, torch.Tensor) else ()
    # A torch.Generator draws in order, so all elements must be rounded at once.
    in_one = cast.rounding == "stochastic" and not drawn and not isinstance(random, RandomStream)
    walked = s.x, by.encode, by.block, by.finite, *drawn
    for x, encode, block, finite, *uniform in chunks(*walked, in_one=in_one):
        bits = uniform[0] if uniform else random
        bits = bits.from_element(done) if isinstance(bits, RandomStream) and done else bits
        scaled = x.float() / encode if by.divides else x.float() * encode
        values = round_finite_(scaled, cast.element, cast.rounding, bits, cast.random_bits)
        if result == "stored":
            values.mul_(block)
        elif result == "codes":
            values = encode_finite_(torch.where(finite, values, 0.0), cast.element)
        if x.shape == s.x.shape:
            return values.to(dtype)
        out = torch.empty(s.x.shape, dtype=dtype, device=x.device) if out is None else out
        out.view(-1)[done : done + x.numel()].view(x.shape).copy_(values)
        done += x.numel()
    assert out is not None
    return out


def in_order(x: torch.Tensor, dim: int, by_halves: bool = False) -> torch.Tensor:
    """The sum along a dimension, in element order, or by pairwise halves while the length is even."""
    while by_halves and x.shape[dim] > 1 and x.shape[dim] % 2 == 0:
        lower, upper = x.chunk(2, dim)
        x = lower + upper
    first, *others = x.split(1, dim)
    for other in others:
        first = first + other
    return first

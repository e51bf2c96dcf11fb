"""Two passes over all elements of a split tensor: the amax of each block, and rounding.

On a CPU with a C compiler they run in C (`in_c`), otherwise as torch operations (`blocks.chunks`), which the
C must match bit for bit.
"""

import torch

from narrowgauge.formats import RandomStream, encode_finite_, round_finite_
from narrowgauge.quantization.blocks import Blocks, amax_along, chunks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import QuantContext
from narrowgauge.quantization.passes import in_c
from narrowgauge.quantization.scales import Scales


def round_blocks(
    split: torch.Tensor,
    blocks: Blocks,
    scales: Scales,
    cast: Cast,
    context: QuantContext,
    result: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Round every element of a split tensor to the grid.

    Args:
        split: The split tensor.
        blocks: Its blocks.
        scales: Their scales.
        cast: The cast.
        context: The source of random bits.
        result: One of `in_c.RESULTS`. A block that is not finite has codes of 0.
        dtype: The dtype of the result.

    Returns:
        The result, in the shape of `split`.
    """
    random, out = context.random_over(blocks), None
    if in_c.takes(split, blocks, cast, dtype):
        block = scales.finite if result == "codes" else scales.block
        rounding = in_c.Rounding(scales.encode, scales.divides, cast, random)
        return in_c.rounded(split, blocks, rounding, result, block, dtype)
    # A torch.Generator draws in order, so all elements must be rounded at once.
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
        values = round_finite_(scaled, cast.element, cast.rounding, bits, cast.random_bits)
        if result == "stored":
            values.mul_(chunk.of(scales.block))
        elif result == "codes":
            values = _codes(values, chunk.of(scales.finite), cast)
        if x.shape == split.shape:
            return values.to(dtype)
        out = torch.empty(split.shape, dtype=dtype, device=split.device) if out is None else out
        chunk.of(out).copy_(values)
    assert out is not None
    return out


def _codes(values: torch.Tensor, finite: torch.Tensor, cast: Cast) -> torch.Tensor:
    if values.device.type != "cpu" or torch.compiler.is_compiling() or not finite.all():
        values = torch.where(finite, values, 0.0)
    return encode_finite_(values, cast.element)


def block_amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The amax of each block of a split tensor: float32, inner dimensions kept with size 1."""
    if not blocks.inner:
        return split.float().abs()
    if split.numel() == 0:
        return blocks.align(torch.zeros(blocks.grid, dtype=torch.float32, device=split.device))
    if in_c.takes(split, blocks):
        return blocks.align(in_c.amax(split, blocks))
    amaxes, dim = [], 0
    for dim, start, size in chunks(split):
        x = split.narrow(dim, start, size)
        # A magnitude is exact in any dtype: a GPU moves half the bytes; a CPU is slow with narrow dtypes.
        amax = x.abs() if x.dtype == torch.float32 or x.device.type != "cpu" else x.float().abs_()
        for inner in reversed(blocks.inner):  # one at a time, innermost first: faster than all at once
            amax = amax_along(amax, inner)
        amaxes.append(amax.float())
    if len(amaxes) == 1:
        return amaxes[0]
    joined = torch.cat(amaxes, dim)
    return joined.amax(dim, keepdim=True) if dim in blocks.inner else joined

"""The two passes of quantization: the scales of all blocks, then every element on its format's grid.

Both work on a split tensor (`Blocks.split`). On a CPU they walk through it in pieces of whole rows that stay
in the cache: an elementwise operation in memory that is asked for anew costs several times its arithmetic.
On a GPU the pieces are large, and there only to bound the memory of what is between. A piece gets exactly
the numbers that the whole would; compiled code takes the whole in one.

A block that holds a NaN or an infinity gets the scale NaN: nothing non-finite ever comes out finite, also in
formats that have no code for it.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from narrowgauge.collectives import all_reduce_max
from narrowgauge.formats import RandomStream, round_finite_
from narrowgauge.quantization import scales
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.sharding.shard import TensorShard

Generator = torch.Generator | RandomStream | torch.Tensor | None
CHUNK = 2**18  # elements that stay in a CPU's cache
LARGE_CHUNK = 2**25  # elements whose temporaries a GPU has room for


class Scales(NamedTuple):
    """Scales of blocks, float32, inner dimensions kept with size 1; `tensor` is 0-dim or None for 1."""

    encode: torch.Tensor  # what an element is multiplied by before it is rounded
    block: torch.Tensor  # what undoes it, without `tensor`
    tensor: torch.Tensor | None
    finite: torch.Tensor  # bool: whether the block holds finite numbers only


Epilogue = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scales_of(
    split: torch.Tensor,
    cast: Cast,
    blocks: Blocks,
    encode_scale: torch.Tensor | None = None,
    part: TensorShard | None = None,
    axis: int = -1,
) -> Scales:
    """The scales of a split tensor's blocks; `encode_scale` (0-dim float32) in place of its own.

    Of a `part` of a global tensor, blocks along `axis`, they are those of the global tensor's blocks.
    """
    amax = block_amax(split, blocks)
    if part is not None and encode_scale is None:
        if cast.block is None and not amax.numel():  # of a global tensor of which nothing lies here
            amax = amax.new_zeros([1] * amax.ndim)
        amax = part.reduce_amax(amax, cast, axis)
    return scales_from(amax, cast, encode_scale, part)


def scales_from(
    amax: torch.Tensor, cast: Cast, encode_scale: torch.Tensor | None = None, part: TensorShard | None = None
) -> Scales:
    """The scales of blocks whose largest magnitudes are known (float32; NaN or infinite: not finite)."""
    finite = amax.isfinite()
    amax = torch.where(finite, amax, 0.0)
    tensor_scale = None
    if encode_scale is not None:
        encode, block = encode_scale.expand_as(amax), (1.0 / encode_scale).expand_as(amax)
    elif cast.scale == "fp32":
        encode, block = scales.fp32_scale(amax, cast.element, cast.power_of_two)
    elif cast.scale == "e8m0":
        assert cast.scale_rule is not None
        encode, block = scales.e8m0_scale(scales.e8m0_code(amax, cast.element, cast.scale_rule))
    else:
        largest = amax.amax() if amax.numel() else amax.new_zeros(())
        if part is not None:
            largest = all_reduce_max(largest, part.groups)
        S, tensor_scale = scales.nvfp4_tensor_scale(largest, cast.element, cast.headroom)
        encode, block = scales.nvfp4_block_scale(amax, S, cast.element, cast.headroom)
    return Scales(encode, torch.where(finite, block, torch.nan), tensor_scale, finite)


def round_blocks(
    split: torch.Tensor,
    own: Scales,
    cast: Cast,
    blocks: Blocks,
    generator: Generator,
    epilogue: Epilogue,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Round every element to the grid; `epilogue(values, block scales, finite)` makes of it what is asked
    for.

    Returns:
        What `epilogue` returned, in `dtype` and the shape of `split`. `epilogue` may use up its values'
        memory.
    """
    if isinstance(generator, RandomStream) and split.numel() != math.prod(blocks.shape):
        # An element's bits are those of its place in the tensor, whatever pads its block.
        generator = blocks.split(generator.uniform(blocks.shape))
    has_order = cast.rounding == "stochastic" and not isinstance(generator, RandomStream | torch.Tensor)
    out = None
    for piece in chunks(split, whole=has_order):
        x = piece.of(split)
        bits = generator
        if isinstance(generator, RandomStream):
            bits = generator.from_element(piece.first_element(split)) if piece.start else generator
        elif isinstance(generator, torch.Tensor):
            bits = piece.of(generator)
        encode = piece.of(own.encode)
        scaled = x * encode if x.dtype == torch.float32 else x.float().mul_(encode)
        values = round_finite_(scaled, cast.element, cast.rounding, bits, cast.random_bits)
        values = epilogue(values, piece.of(own.block), piece.of(own.finite))
        if x.shape == split.shape:
            return values.to(dtype)
        out = torch.empty(split.shape, dtype=dtype, device=split.device) if out is None else out
        piece.of(out).copy_(values)
    assert out is not None
    return out


class Chunk(NamedTuple):
    """Some of a split tensor: a range of positions along one dimension."""

    dim: int
    start: int
    size: int

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """This piece of a tensor of the same dimensions; where it has one position, it is for all pieces."""
        return t if not t.ndim or t.shape[self.dim] == 1 else t.narrow(self.dim, self.start, self.size)

    def first_element(self, split: torch.Tensor) -> int:
        """The number of its first element in the tensor."""
        return self.start * (split.numel() // split.shape[self.dim])


def chunks(split: torch.Tensor, whole: bool = False) -> Iterator[Chunk]:
    """The pieces of a split tensor, in the order of its elements."""
    dim = 1 if split.ndim > 1 and split.shape[0] == 1 else 0
    elements = CHUNK if split.device.type == "cpu" else LARGE_CHUNK
    if split.is_meta:  # where only memory is asked for
        elements = max(elements, split.numel() // 64)
    if whole or torch.compiler.is_compiling() or split.numel() <= elements:
        yield Chunk(dim if split.ndim else 0, 0, split.shape[dim] if split.ndim else 1)
        return
    length = split.shape[dim]
    size = max(1, elements * length // split.numel())
    for start in range(0, length, size):
        yield Chunk(dim, start, min(size, length - start))


def block_amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Largest magnitude of each block of a split tensor, float32, inner dims kept with size 1."""
    if not blocks.inner:
        return split.float().abs()
    if split.numel() == 0:
        grid = torch.zeros(blocks.grid, device=split.device)
        for dim in blocks.inner:
            grid = grid.unsqueeze(dim)
        return grid
    parts, dim = [], 0
    for dim, start, size in chunks(split):
        part = split.narrow(dim, start, size)
        largest = part.abs() if part.dtype == torch.float32 else part.float().abs_()
        for inner in reversed(blocks.inner):  # one at a time, the innermost first: faster than all at once
            largest = largest.amax(inner, keepdim=True)
        parts.append(largest)
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat(parts, dim)
    return joined.amax(dim, keepdim=True) if dim in blocks.inner else joined

"""A tensor to narrow numbers and back.

`quantize` gives the codes and scales that would be stored; `emulate` gives what a GEMM on such numbers
would see: the same numbers in a high-precision dtype, so that any device can compute with them. Both take
their numbers from `grid.py`, so an emulated GEMM uses exactly the numbers that are stored.
"""

from dataclasses import dataclass, replace

import torch

from narrowgauge.errors import UserError
from narrowgauge.formats import RandomStream, decode, encode, encode_finite_, format, pack, torch_dtype
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.cast import cast as cast_named
from narrowgauge.quantization.hadamard import hadamard
from narrowgauge.quantization.outliers import clamp_outliers
from narrowgauge.quantization.scale_and_round import Generator, round_blocks, scales_of
from narrowgauge.quantization.sharding.shard import TensorShard


@dataclass(frozen=True, slots=True)
class QTensor:
    """A tensor in narrow numbers: x ~ value(codes) * scales (over their blocks) * tensor_scale.

    Attributes:
        codes: uint8, one code an element, in the shape of x.
        scales: float32, the decoded scale of each block: 0-dim where the tensor is one block, otherwise
            one entry a block (`x.shape` divided by the block's extents, rounded up).
        scale_codes: uint8 codes of the scales where their format has 8 bits (E8M0, E4M3), else None.
        tensor_scale: float32 0-dim, the second-level scale of NVFP4, else 1.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scale_codes: torch.Tensor | None
    tensor_scale: torch.Tensor
    cast: Cast
    blocks: Blocks

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers that are stored, computed in float32 and converted to `dtype`."""
        values = self.blocks.split(decode(self.codes, self.cast.element))
        scale = over_block(self.scales, self.blocks) if self.scales.ndim else self.scales
        return self.blocks.merge(values * scale * self.tensor_scale).to(dtype)

    def packed(self) -> torch.Tensor:
        """The element bytes as stored, without scales: two FP4 codes a byte, four FP6 codes in three."""
        return pack(self.codes, self.cast.element)


def quantize(
    x: torch.Tensor,
    cast: str | Cast,
    axis: int = -1,
    scale_rule: str | None = None,
    rounding: str | None = None,
    generator: Generator = None,
    signs: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
    part: TensorShard | None = None,
) -> QTensor:
    """Quantize a tensor to the codes and scales of a cast.

    Args:
        x: floating tensor of any shape; computed as float32.
        cast: a cast or its name, such as "mxfp4".
        axis: the axis a GEMM would contract; blocks lie along it.
        scale_rule: for E8M0 scales, another rule than the cast's ("floor", "ceil", "even", "rceil").
        rounding: another rounding than the cast's, such as "stochastic".
        generator: random bits for stochastic rounding.
        signs: of a Hadamard transform whose cast says "random".
        encode_scale: 0-dim float32, in place of the scale of a whole tensor (delayed scaling).
        part: where `x` lies in a tensor that several processes hold together, all of which call this.

    Raises:
        UserError: unknown cast, rule or rounding; a cast without scales; a shape the blocks do not fit.
    """
    c = cast_named(cast) if isinstance(cast, str) else cast
    c = replace(c, scale_rule=scale_rule or c.scale_rule, rounding=rounding or c.rounding)
    if not c.is_scaled:
        raise UserError(f"cast {c.name!r} stores no scales; use torch's .to() or narrowgauge.round_to for it")
    if c.element.bits > 8 or c.codebook:
        raise UserError(
            f"cast {c.name!r} has no codes of a byte: it is for state (weight, master, grad, m, v)"
        )
    x = prepared(x.detach(), c, axis, signs, part)
    blocks = blocks_of(x.shape, c, axis)
    split = blocks.split(x)
    scales = scales_of(split, c, blocks, encode_scale, part, axis)
    generator = _of_part(generator, part, blocks)

    def codes_of(values: torch.Tensor, _: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        return encode_finite_(_zero_where_not(finite, values), c.element)

    codes = round_blocks(split, scales, c, blocks, generator, codes_of, torch.uint8)
    whole = c.block is None

    def per_block(t: torch.Tensor) -> torch.Tensor:
        if whole and not t.numel():  # an empty tensor
            return torch.ones((), device=t.device)
        return t.reshape(() if whole else blocks.grid)

    return QTensor(
        codes=blocks.merge(codes).contiguous(),
        scales=per_block(scales.block),
        scale_codes=None if c.scale == "fp32" else encode(per_block(scales.block), format(c.scale)),
        tensor_scale=torch.ones((), device=x.device) if scales.tensor is None else scales.tensor,
        cast=c,
        blocks=blocks,
    )


def emulate(
    x: torch.Tensor,
    cast: Cast,
    axis: int,
    dtype: torch.dtype,
    generator: Generator = None,
    signs: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
    part: TensorShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a GEMM on narrow numbers sees: (operand, scale), with x ~ operand * scale.

    Every product of an element and a block scale of FP8 x 2^k or FP4 x E4M3 is exact in bf16; the fp32
    scale of a whole tensor is not, so it is returned apart (a 0-dim float32 tensor, or None for 1), to be
    applied to the GEMM's result. Blocks with other fp32 scales come out in float32, and so does a tensor
    whose outliers are added again. `encode_scale` (0-dim float32) replaces the tensor's own scale, `part` is
    that of `quantize`.
    """
    whole, x = x, prepared(x, cast, axis, signs, part)
    if not cast.is_scaled:
        return x.to(torch_dtype(cast.element)), None
    blocks = blocks_of(x.shape, cast, axis)
    split = blocks.split(x)
    scales = scales_of(split, cast, blocks, encode_scale, part, axis)
    generator = _of_part(generator, part, blocks)
    if cast.block is None and not cast.compensate:
        values = round_blocks(split, scales, cast, blocks, generator, lambda values, *_: values, dtype)
        return blocks.merge(values), scales.block.reshape(())

    def stored(values: torch.Tensor, block: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return values.mul_(block)

    is_exact = (cast.scale != "fp32" or cast.power_of_two) and not cast.compensate
    values = round_blocks(
        split, scales, cast, blocks, generator, stored, dtype if is_exact else torch.float32
    )
    operand = blocks.merge(values)
    if cast.compensate:
        # What was clamped away is added again; in float32, as a difference of bf16 is not exact.
        operand.add_(whole.float() - x.float())
    return operand, scales.tensor


def _of_part(generator: Generator, part: TensorShard | None, blocks: Blocks) -> Generator:
    """The random numbers of the elements that lie here."""
    if part is None or not isinstance(generator, RandomStream):
        return generator
    generator = part.bits_of(generator)
    return blocks.split(generator) if isinstance(generator, torch.Tensor) else generator


def prepared(
    x: torch.Tensor, cast: Cast, axis: int, signs: torch.Tensor | None, part: TensorShard | None = None
) -> torch.Tensor:
    """The tensor that is quantized: transformed, without its outliers."""
    if cast.hadamard and part is not None:
        part.require_aligned(cast.hadamard, axis, cast)
    x = transformed(x, cast, axis, signs)
    return clamp_outliers(x, cast.outliers, part) if cast.outliers else x


def transformed(x: torch.Tensor, cast: Cast, axis: int, signs: torch.Tensor | None) -> torch.Tensor:
    """The tensor after the cast's Hadamard transform, if it has one."""
    return hadamard(x, cast.hadamard, axis, signs_of(cast, signs)) if cast.hadamard else x


def signs_of(cast: Cast, signs: torch.Tensor | None) -> torch.Tensor | tuple[int, ...]:
    """The signs of a cast's transform: those that are given, or its own (() for the size's)."""
    if signs is not None:
        return signs
    if isinstance(cast.signs, str):
        raise UserError(
            f"cast {cast.name!r} takes random signs, which a recipe draws in each step; give signs"
        )
    return cast.signs


def _zero_where_not(finite: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values with zeros in the blocks that are not finite."""
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and finite.all():
        return values
    return torch.where(finite, values, 0.0)


def over_block(scale: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Scales in the shape of the grid, with a dimension of size 1 for every inner dimension of a block."""
    for dim in blocks.inner:
        scale = scale.unsqueeze(dim)
    return scale

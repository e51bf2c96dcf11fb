"""Quantizes a tensor and restores it.

`quantize` gives the codes and scales that would be stored; `emulate` gives what a GEMM on them would see: the
same values in a high-precision dtype, so that any device can compute with them. Both round in one function
of an engine, so an emulated GEMM uses exactly the values that are stored.

One engine rounds the elements of a tensor that is split into blocks (`passes.in_c` on a CPU, else
`passes.in_torch`), in one pass if no scale depends on more than its block. What does is found before
(`_known`): the amax that an outer scale comes from, the amaxes of blocks that processes share, a scale that
is given or rounded stochastically, and a correction.

Scales come from the amax of each block (`scales.py`). With `candidates`, a block is rounded once for each
candidate magnitude and keeps the scale with the least error; `correct` multiplies the scales by the factor
that makes a projection exact.

A block that contains NaN or infinity gets the scale NaN: non-finite values never come out finite, even in
formats that have no code for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from narrowgauge.formats import (
    Format,
    Randomness,
    RandomStream,
    codes_of,
    decode,
    format,
    pack,
    require_values,
    torch_dtype,
)
from narrowgauge.formats.rounding import exponent_bits, inverse_quantum
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.keys import Consumer
from narrowgauge.quantization.named_casts import cast as named_cast
from narrowgauge.quantization.named_casts import make_cast, values_of
from narrowgauge.quantization.passes import in_c, in_torch
from narrowgauge.quantization.passes.in_torch import Narrowed, Split
from narrowgauge.quantization.scales import Scales, rounded
from narrowgauge.quantization.sharding.shard import TensorShard, full_axis
from narrowgauge.quantization.transforms import (
    Prepared,
    clamp_outliers,
    hadamard,
    kept_channels,
    split_channels,
)
from narrowgauge.system.errors import UserError, require

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = (torch.float32, *_SHORT)


@dataclass(frozen=True, slots=True)
class QTensor:
    """A quantized tensor: x ~ value(codes) * scales (over their blocks) * tensor_scale.

    Attributes:
        codes: uint8, one code per element, in the shape of x.
        scales: float32, the decoded scale of each block: 0-dim where the tensor is one block, otherwise
            one entry per block (`x.shape` divided by the block's extents, rounded up).
        scale_codes: uint8 codes of the scales where their format has 8 bits (E8M0, E4M3, UE5M3), else None.
        tensor_scale: float32, the second-level scale of NVFP4: 0-dim, or one per row, with size 1 along the
            axis of the blocks, or one per group of columns in a row; else 1.
        cast: The cast that the tensor was quantized with.
        blocks: The blocks that share a scale.
        mean: The mean that was subtracted (`center`), float32, to be added back; else None.
        channels: bool, for each channel whether it is kept in another cast (`keep_channels`); codes and
            scales cover the rest, with zeros there. None if all channels share the cast.
        kept: float32, the values of kept channels in their cast, zeros elsewhere; else None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scale_codes: torch.Tensor | None
    tensor_scale: torch.Tensor
    cast: Cast
    blocks: Blocks
    mean: torch.Tensor | None = None
    channels: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def __repr__(self) -> str:
        above = self.tensor_scale
        is_one = above.numel() == 1 and above.device.type != "meta"
        scale = f"{above.item():.6g}" if is_one else f"a tensor of shape {tuple(above.shape)}"
        return (
            f"QTensor(shape={tuple(self.codes.shape)}, dtype={self.codes.dtype}, device={self.codes.device}, "
            f"scales of shape {tuple(self.scales.shape)}, tensor_scale={scale}, cast={self.cast!r})"
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The stored values, computed in float32, where a product may be infinite; clamped for other dtypes.

        Raises:
            UserError: The dtype has no scales' range: it is not a floating one of 16 bits or more.
        """
        if dtype not in (wide := (*_DTYPES, torch.float64)):
            raise UserError(f"dtype = {dtype}: it must be one of {', '.join(map(str, wide))}")
        numbers = self._elements(with_outer=True)
        numbers = numbers if self.mean is None else numbers + self.mean
        if self.channels is not None and self.kept is not None:
            numbers = torch.where(self.channels, self.kept, numbers)
        most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return numbers if dtype == torch.float32 else numbers.clamp_(-most, most).to(dtype)

    def operand(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The operand and scale that `emulate` gives."""
        dtype = operand_dtype(self.cast, dtype)
        if self.cast.block is None:
            return in_c.decoded(self.codes, self.cast.element, dtype), self.scales
        numbers = self._elements(self.cast.has_row_scales)
        is_apart = self.cast.tensor_scale == "tensor"
        return numbers.to(dtype), self.tensor_scale if is_apart else None

    def _elements(self, with_outer: bool) -> torch.Tensor:
        """Elements times the scales of their blocks, and perhaps times the outer scale."""
        block, outer = self.aligned_scales()
        numbers = self.blocks.split(decode(self.codes, self.cast.element)) * block
        return self.blocks.merge(numbers.mul_(outer) if with_outer else numbers)

    def aligned_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of blocks and the outer scale, which broadcast over a split tensor."""
        blocks, outer = self.blocks, self.tensor_scale
        if columns := self.cast.outer_columns:
            axis = [size > 1 for size in blocks.size].index(True)
            outer = outer.repeat_interleave(columns // blocks.size[axis], axis)
            outer = outer.narrow(axis, 0, blocks.grid[axis])
        block = blocks.align(self.scales) if self.scales.ndim else self.scales
        return block, blocks.align(outer) if outer.ndim else outer

    def packed(self) -> torch.Tensor:
        """The element bytes as stored, without scales: two FP4 codes per byte, four FP6 codes in three."""
        return pack(self.codes, self.cast.element)


def quantize(
    x: torch.Tensor,
    cast: str | Mapping[str, Any] | Format | Cast,
    axis: int = -1,
    scale_rule: str | None = None,
    rounding: str | None = None,
    generator: Randomness = None,
) -> QTensor:
    """Quantize a tensor to the codes and scales of a cast.

    Args:
        x: A floating tensor of any shape; computed with as float32. The result has no gradient.
        cast: A cast, its name such as "mxfp4", a recipe's table such as
            {"element": "e2m1", "block": 16, "scale": "e5m3"}, or a format, which has one scale a tensor.
        axis: The axis that a GEMM would contract; blocks lie along it.
        scale_rule: For E8M0 scales, another rule than the cast's ("floor", "ceil", "even", "rceil").
        rounding: Another rounding than the cast's, such as "stochastic".
        generator: The source of random bits for stochastic rounding.

    Returns:
        The codes and scales; `dequantize` and `packed` are its methods.

    Raises:
        UserError: Not a dense floating tensor; unknown cast, rule or rounding; a cast without scales; a
            shape that the blocks do not fit.
    """
    require_values(x)
    require("axis", axis, int)
    require("generator", generator, torch.Generator, RandomStream, torch.Tensor, type(None))
    c = make_cast(cast)
    if scale_rule or rounding:
        c = c.having(scale_rule=scale_rule or c.scale_rule, rounding=rounding or c.rounding)
    return quantize_in_context(_as_computed(x), c, axis, QuantContext(random=generator))


def quantize_in_context(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> QTensor:
    """`quantize` under a context: given signs, a given scale, or as a shard of a global tensor."""
    _require_codes(cast)
    if cast.keep_channels:
        channels, rest, kept = _apart(x.detach(), cast, axis, torch.float32, context)
        q = quantize_in_context(rest, cast.of_the_rest, axis, context)
        return replace(q, cast=cast, channels=channels, kept=_as_long(kept, q.codes.shape))
    prepared, blocks, (codes, block, outer) = _narrowed(x.detach(), cast, axis, context, "codes", torch.uint8)
    scales = block.reshape(() if cast.block is None else blocks.grid)
    return QTensor(
        codes=blocks.merge(codes).contiguous(),
        scales=scales,
        scale_codes=codes_of(scales, format(cast.scale)) if cast.has_coded_scales else None,
        tensor_scale=_above(prepared.x, outer, blocks, cast, axis),
        cast=cast,
        blocks=blocks,
        mean=prepared.mean,
    )


def _require_codes(cast: Cast) -> None:
    """Refuse a cast whose elements are not scaled codes of at most a byte."""
    if cast.function:
        raise UserError(
            f"cast {cast.name!r} is a function, which gives values and no codes; call the function itself"
        )
    if not cast.is_scaled:
        raise UserError(f"cast {cast.name!r} stores no scales; use torch's .to() or narrowgauge.round_to")
    if cast.element.bits > 8 or cast.codebook:
        raise UserError(
            f"cast {cast.name!r} has no codes of a byte: it is for state (weight, master, grad, m, v)"
        )


def emulate(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext = DEFAULT_CONTEXT
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operand and scale that a low-precision GEMM sees: x ~ operand * scale.

    The product of an element and a block scale is exact in bf16 for FP8 x 2^k and FP4 x E4M3. The fp32 scale
    of a full tensor is not, so it is returned separately, to be applied to the GEMM's result. The operand is
    float32 where that product has more bits (other fp32 scales, bf16 scales, fp32 outer scales of rows), and
    where outliers or a mean are added back or some channels are kept apart.

    Returns:
        The operand, in the GEMM's `dtype` where that is exact, and a 0-dim float32 scale or None for 1.
    """
    require_values(x)
    if x.requires_grad and torch.is_grad_enabled():
        raise UserError("x requires a gradient, which emulate does not have; give x.detach()")
    return emulate_in_context(_as_computed(x) if cast.is_scaled else x, cast, axis, dtype, context)


def emulate_in_context(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`emulate` of what a layer computes with, unchecked."""
    if cast.keep_channels:
        channels, rest, kept = _apart(x, cast, axis, dtype, context)
        values, scale = emulate_in_context(rest, cast.of_the_rest, axis, dtype, context)
        values = values if scale is None else values.float().mul_(scale)
        return torch.where(channels, _as_long(kept, values.shape), values), None
    if cast.function:
        if context.shard is not None:
            raise UserError(
                f"cast {cast.name!r} is a function, which sees the part of a tensor that one process holds, "
                "and its values would depend on their number; train in one process, or with whole tensors"
            )
        return values_of(cast.function, x, axis), None
    if not cast.is_scaled:
        return prepared_by(x, cast, axis, context).x.to(torch_dtype(cast.element)), None
    is_plain, dtype = cast.block is None and not cast.adds_to_operand, operand_dtype(cast, dtype)
    result = "values" if is_plain else "stored"
    prepared, blocks, (values, block, outer) = _narrowed(x, cast, axis, context, result, dtype)
    if not cast.adds_to_operand:
        return blocks.merge(values), block.reshape(()) if is_plain else outer
    operand = blocks.merge(values if outer is None else values.mul_(outer))
    if prepared.mean is not None:
        operand.add_(prepared.mean)
    if cast.compensate and prepared.unclamped is not None:  # in float32, as a difference of bf16 is not exact
        operand.add_(prepared.unclamped.to(torch.float32, copy=True).sub_(prepared.x))
    return operand, None


def _narrowed(
    x: torch.Tensor, cast: Cast, axis: int, context: QuantContext, result: str, dtype: torch.dtype
) -> tuple[Prepared, Blocks, Narrowed]:
    """A tensor after its transforms, its blocks, and its elements and scales (`passes.in_torch.narrow`)."""
    prepared = prepared_by(x, cast, axis, context)
    blocks, context = blocks_of(prepared.x.shape, cast, axis), context.drawn_for(prepared.x, cast)
    s = Split(blocks.split(prepared.x), blocks, cast, axis, context)
    engine = in_c if in_c.supports(s.x, blocks, cast, dtype) else in_torch
    return prepared, blocks, engine.narrow(_known(engine, s), result, dtype)


def operand_dtype(cast: Cast, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an operand for a GEMM in `dtype`: float32 where that would round or overflow."""
    is_short = dtype == torch.float16 and cast.block is not None  # its range is less than that of scales
    is_rounded = cast.is_scaled and dtype in _SHORT and _SHORT[dtype] not in cast.held_in
    is_wide = cast.has_wide_operand or is_short or is_rounded
    return torch.float32 if is_wide else dtype


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, if it is not in a dtype of 16 bits."""
    return x if x.dtype in _DTYPES else x.float()


def prepared_by(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> Prepared:
    """A tensor after the transforms of its cast."""
    if left := cast.unsupported[Consumer.TORCH]:
        raise UserError(f"cast {cast.name!r}: nothing computes {', '.join(left)}; remove the key")
    mean: torch.Tensor | None = None
    unclamped: torch.Tensor | None = None
    if cast.center:
        mean = context.token_mean(x, in_c.token_sums(x)).float()
        x, mean = x - mean, _rounded_mean(mean, cast, context)  # both in float32
    if cast.hadamard:  # of the tensor and of its mean, so that their sum is the transformed tensor
        signs = context.signs_of(cast)
        if context.shard is not None:
            context.shard.require_aligned(cast.hadamard, axis, cast)
        mean = None if mean is None else hadamard(mean.expand_as(x), cast.hadamard, axis, signs)
        x = hadamard(x, cast.hadamard, axis, signs)
    if cast.outliers or cast.compensate:
        unclamped = x
        x = clamp_outliers(x, cast.outliers, context) if cast.outliers else x
    return Prepared(x, mean, unclamped)


def _rounded_mean(mean: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
    """The mean over tokens that is added back, rounded to `center_cast` if there is one."""
    if not cast.center_cast:
        return mean
    shard = context.shard  # one row stands for all
    of_row = QuantContext(shard=None if shard is None else TensorShard((full_axis(1), shard.axes[-1])))
    row = quantize_in_context(mean.flatten(0, -2), named_cast(cast.center_cast), -1, of_row)
    return row.dequantize().view(mean.shape)


def _apart(
    x: torch.Tensor, cast: Cast, axis: int, dtype: torch.dtype, context: QuantContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(which channels are kept, the tensor without them, the values of these alone in their cast)."""
    channels = kept_channels(x, cast, context)
    rest, alone = split_channels(x, channels)
    plain = QuantContext(shard=context.shard)
    kept, scale = emulate_in_context(alone, named_cast(cast.keep_cast), axis, dtype, plain)
    return channels, rest, kept if scale is None else kept.float() * scale


def _as_long(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The tensor, zero-padded where a transform has lengthened the other part."""
    missing = [longer - n for longer, n in zip(shape, x.shape, strict=True)]
    if not any(missing):
        return x
    return torch.nn.functional.pad(x, [n for extra in reversed(missing) for n in (0, extra)])


def _above(
    x: torch.Tensor, tensor_scale: torch.Tensor | None, blocks: Blocks, cast: Cast, axis: int
) -> torch.Tensor:
    """A second-level scale: 0-dim, one per row, or one per group of columns in a row."""
    if tensor_scale is None:
        return torch.ones((), dtype=torch.float32, device=x.device)
    if not tensor_scale.ndim:
        return tensor_scale
    axis %= x.ndim
    if not cast.outer_columns:
        return tensor_scale.reshape([1 if dim == axis else n for dim, n in enumerate(x.shape)])
    of_blocks = tensor_scale.reshape(blocks.grid)
    columns = cast.outer_columns // blocks.size[axis]
    first = torch.arange(0, of_blocks.shape[axis], columns, device=x.device)
    return of_blocks.index_select(axis, first)


def scales_of(s: Split) -> Scales:
    """The scales of a split tensor's blocks; for a sharded tensor, the global one's."""
    engine = in_c if in_c.supports(s.x, s.blocks, s.cast) else in_torch
    return engine.scales(_known(engine, s))[0]


def block_amax(split: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The amax of each block of a split tensor: float32, inner dimensions kept with size 1."""
    return (in_c if in_c.supports(split, blocks) else in_torch).amax(split, blocks)


def _known(engine: ModuleType, s: Split) -> Split:
    """A split tensor with what must be known before its elements are rounded."""
    cast, context, plain = s.cast, s.context, s.cast.uncorrected
    is_given = context.scale is not None or plain.scale_rounding != "nearest-even"
    has_outer = cast.tensor_scale != "none"
    amax: torch.Tensor | None = None
    over: torch.Tensor | None = None
    if s.blocks.is_one or context.shard is not None or has_outer or is_given:
        amax = context.global_amax(engine.amax(s.x, s.blocks), cast, s.axis)
    if has_outer and amax is not None:
        finite = amax.nan_to_num(0.0, 0.0)  # no block that is not finite counts
        over = (
            context.row_amax(finite, s.blocks, s.axis, cast)
            if cast.has_row_scales
            else context.tensor_amax(finite)
        )
    s = s._replace(cast=plain, amax=amax, over=over)
    if is_given:
        s = s._replace(scales=in_torch.best(s, context.random_over_grid(s.blocks, plain, s.axis)))
    if cast.correct:
        s = s._replace(scales=_corrected(s._replace(cast=cast), *engine.scales(s, with_sums=True)))
    return s._replace(cast=cast)


def _corrected(s: Split, found: Scales, sums: tuple[torch.Tensor, ...]) -> Scales:
    """Scales times the factor that makes each group's projection on itself exact, rounded again."""
    assert s.cast.block is not None
    dim = s.blocks.grid_dim(s.axis % len(s.blocks.size))
    per_group = max(s.cast.hadamard // s.cast.block[1], 1)
    above, below = (in_torch.in_order(t.unflatten(dim, (-1, per_group)), dim + 1) for t in sums)
    factor = torch.where(below == 0, 1.0, above / below)
    factor = factor.repeat_interleave(per_group, dim + 1).flatten(dim, dim + 1)
    scale = torch.where(found.finite, found.block, 1.0) * factor
    block, _ = rounded(scale, s.cast, s.context.random_over_grid(s.blocks, s.cast, s.axis))
    return found._replace(block=torch.where(found.finite, block, torch.nan))


def estimator_slope(
    w: torch.Tensor, cast: Cast, axis: int, context: QuantContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """The slope of rounding at each element of a weight, float32, under a cast with fp32 scales (`keys`)."""
    blocks = blocks_of(w.shape, cast, axis)
    split = blocks.split(w.detach())
    t = split.float() * scales_of(Split(split, blocks, cast, axis, context)).encode
    t.abs_().clamp_(max=cast.element.max)
    t.mul_(inverse_quantum(exponent_bits(t, cast.element), cast.element, t.dtype))  # in units of d, exact
    slope = t.sub_(t.floor()).mul_(2).sub_(1).abs_()
    slope.pow_(1 / cast.estimator_k - 1).div_(cast.estimator_k).clamp_(max=cast.estimator_cap)
    return blocks.merge(slope)

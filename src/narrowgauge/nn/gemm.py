"""The matmul of two operands, each given as (rows, contraction): c_MN = a_MK @ b_NK.T.

An emulated operand carries the scale of a full tensor separately from its values. The scale must be applied
to the fp32 accumulator, before the result is rounded to bf16; applied later, it would round the result twice.
On a CPU oneDNN applies `alpha` to the accumulator (fp32 matmuls do not use it: MKL treats an alpha of NaN as
1); on a GPU the matmul returns fp32.

In compiled graphs each matmul, each bias and its gradient is one operator. Traced, torch's compiler would
fuse a matmul with an addition that follows (a bias, another gradient) into one `addmm`, and would read values
before they are rounded to bf16. Both skip a rounding that an eager layer makes, which the next cast to four
bits turns into whole steps of its grid. It would also sum the gradient of a bias in another order.

An operand with a scale per row, and with outliers that are added back, would be exact only in fp32, and a GPU
multiplies fp32 at a fourteenth of the speed of bf16. There it is kept in parts, and the matmul is done in
two, each of bf16 values:

    x_MK = s_M q_MK + r_MK      w_NK = t_N p_NK      x @ w.T = (s_M (q_MK @ p_NK.T) + r_MK @ p_NK.T) t_N

Both matmuls accumulate in fp32, and the result is rounded once.

**Native operands** are codes and scales, which the hardware multiplies directly, through
`torch.nn.functional.scaled_mm`. The values are the results of `quantize`, the same codes and scales that are
emulated elsewhere; only the order of summation is the hardware's. The code here handles layout: both operands
are stored in bytes along the contraction, and scales in the order in which their kernel reads them:

    one per tensor    one float32
    one per row       float32 (M, 1) of the first operand, (1, N) of the second
    1 x 128           float32, one entry per row and block, rows contiguous
    128 x 128         float32, blocks contiguous along the contraction, their number padded to 4
    1 x 32, 1 x 16    bytes in tiles of 128 rows x 4 blocks (`tiled`); NVFP4 adds its tensor scale

Dimensions that the matrix units do not support are padded with zeros, which changes no sum, and cropped
afterwards.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from narrowgauge.devices import is_gpu, is_shape_only
from narrowgauge.formats import Format, pack, torch_dtype
from narrowgauge.kernels.cast import Tiles, quantize_in_tiles
from narrowgauge.kernels.dispatch import is_slow, is_traced, sums_in_fp32, use_kernels
from narrowgauge.kernels.product import aligned_rows, scaled_and_rounded, scaled_rows_and_rounded
from narrowgauge.quantization import Cast, QTensor, QuantContext
from narrowgauge.torch_compat import ScalingType, SwizzleType, is_in_torch_dispatch_mode
from narrowgauge.torch_compat import scaled_mm as torch_scaled_mm

_VECTOR = 16  # bytes of the widest load
ROWS = 16  # dimensions of the result are multiples of this
TILED = {
    "e8m0": (ScalingType.BlockWise1x32, torch.float8_e8m0fnu),
    "e4m3": (ScalingType.BlockWise1x16, torch.float8_e4m3fn),
}


class Operand(NamedTuple):
    """An emulated operand as (rows, contraction): values in a wide dtype, and a 0-dim scale or None for 1."""

    values: torch.Tensor
    scale: torch.Tensor | None = None

    def transposed(self) -> "Operand":
        """The same values along the other axis."""
        return Operand(self.values.T, self.scale)

    def numbers(self) -> torch.Tensor:
        """The values that a matmul sees, scale applied."""
        return self.values if self.scale is None else self.values.float() * self.scale


class RowOperand(NamedTuple):
    """An emulated operand as (rows, contraction) in parts: values * scale + rest.

    Attributes:
        values: bf16.
        scale: float32, one per row.
        rest: bf16, the clamped remainder to add back; None for none.
    """

    values: torch.Tensor
    scale: torch.Tensor
    rest: torch.Tensor | None = None

    def numbers(self) -> torch.Tensor:
        """The values that a matmul sees, float32."""
        numbers = self.values.float() * self.scale.unsqueeze(1)
        return numbers if self.rest is None else numbers + self.rest

    def transposed(self) -> Operand:
        """The same values along the other axis, where they have no separate scale."""
        return Operand(self.numbers().T)


class QuantizedOperand(NamedTuple):
    """An operand as (rows, contraction) in codes and scales.

    Attributes:
        codes: uint8, one per element.
        scales: One entry per block, or 0-dim: uint8 codes if their format has 8 bits, else float32.
        tensor_scale: 0-dim float32.
        cast: The cast of the operand.
        other: The same codes as (contraction, rows), if they were written twice.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    cast: Cast
    other: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """The rows."""
        return self.codes.shape[0]

    def transposed(self) -> "QuantizedOperand":
        """The same values along the other axis."""
        scales = self.scales.T if self.scales.ndim else self.scales
        codes = self.codes.T if self.other is None else self.other
        return QuantizedOperand(codes, scales, self.tensor_scale, self.cast)


class TiledOperand(NamedTuple):
    """An operand as (rows, contraction) that a kernel laid out for the hardware, along one axis or both.

    Attributes:
        rows: The rows without padding.
        tiles: Packed codes, and scales in tiles.
        cast: The cast of the operand.
        other: The same values contracted along the other axis, if they are.
    """

    rows: int
    tiles: Tiles
    cast: Cast
    other: "TiledOperand | None" = None

    def transposed(self) -> "TiledOperand":
        """The same values along the other axis."""
        assert self.other is not None, "values that depend on the axis"
        return self.other


NativeOperand = QuantizedOperand | TiledOperand
AnyOperand = Operand | RowOperand | NativeOperand


def _scaled(
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    scale: torch.Tensor,
    other: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(a @ b) * (scale * other) with one rounding; scales are 0-dim float32 tensors.

    Both operands are first widened to `dtype`, by default that of a, which is also that of the result.
    """
    dtype = dtype or a_MK.dtype
    a_MK, b_KN = a_MK.to(dtype), b_KN.to(dtype)
    if not (a_MK.device.type == "cpu" or a_MK.dtype == torch.float32):
        return scaled_and_rounded(_summed_in_fp32(a_MK, b_KN), scale, dtype, other)
    scale = scale if other is None else scale * other
    if a_MK.dtype == torch.float32 or is_slow(a_MK):
        return ((a_MK.float() @ b_KN.float()) * scale).to(a_MK.dtype)
    nothing = a_MK.new_zeros(())
    return torch.addmm(nothing, a_MK, b_KN, beta=0, alpha=scale.item())


scaled_mm = torch.library.custom_op("narrowgauge::scaled_mm", _scaled, mutates_args=())
scaled_mm.register_fake(
    lambda a, b, scale, other=None, dtype=None: a.new_empty(a.shape[0], b.shape[1], dtype=dtype or a.dtype)
)


@torch.library.custom_op("narrowgauge::mm", mutates_args=())
def plain_mm(a_MK: torch.Tensor, b_KN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b in a dtype in a compiled graph: `_plain_product` with contiguous rows."""
    a_MK, b_KN = a_MK.to(dtype), b_KN.to(dtype)
    return (a_MK.float() @ b_KN.float()).to(dtype) if is_slow(a_MK) else a_MK @ b_KN


plain_mm.register_fake(lambda a, b, dtype: a.new_empty(a.shape[0], b.shape[1], dtype=dtype))


@torch.library.custom_op("narrowgauge::add_bias", mutates_args=())
def biased(y_MN: torch.Tensor, bias_N: torch.Tensor) -> torch.Tensor:
    """Add a bias to a matmul's result in a compiled graph."""
    return y_MN + bias_N.to(y_MN.dtype)


biased.register_fake(lambda y_MN, bias_N: torch.empty_like(y_MN))


def add_bias(y_MN: torch.Tensor, bias_N: torch.Tensor) -> torch.Tensor:
    """y + bias, rounded to the dtype of y; in its memory, except in compiled graphs."""
    # in place: allocating another tensor of this size costs page faults
    return biased(y_MN, bias_N) if is_traced() else y_MN.add_(bias_N.to(y_MN.dtype))


@torch.library.custom_op("narrowgauge::sum_rows", mutates_args=())
def summed(dy_MN: torch.Tensor) -> torch.Tensor:
    """Sum the rows in a compiled graph, in torch's order."""
    return dy_MN.sum(0, dtype=torch.float32)


summed.register_fake(lambda dy_MN: dy_MN.new_empty(dy_MN.shape[1], dtype=torch.float32))


def sum_rows(dy_MN: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias, in float32."""
    return summed(dy_MN) if is_traced() else dy_MN.sum(0, dtype=torch.float32)


def multiply(a: AnyOperand, b: AnyOperand, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """The matmul of (M, K) and (N, K) as (M, N).

    Native operands return `dtype` (`fast`: see `native_product`), emulated ones that dtype or theirs, if
    wider.
    """
    if isinstance(a, NativeOperand) and isinstance(b, NativeOperand):
        return native_product(a, b, dtype, fast)
    assert not isinstance(a, NativeOperand)
    assert not isinstance(b, NativeOperand)
    if isinstance(a, RowOperand) or isinstance(b, RowOperand):
        if _are_bf16(a, b):
            return _product_by_rows(a, b, dtype)
        a, b = (Operand(x.numbers()) if isinstance(x, RowOperand) else x for x in (a, b))
    assert isinstance(a, Operand)
    assert isinstance(b, Operand)
    a_MK, b_KN = a.values, b.values.T
    # If one operand or the result is kept wider, the matmul runs in the wider dtype.
    wider = torch.promote_types(torch.promote_types(a_MK.dtype, b_KN.dtype), dtype)
    scales = [s for s in (a.scale, b.scale) if s is not None]
    if not scales:
        if is_traced():
            return plain_mm(a_MK, b_KN, wider)
        return _plain_product(a_MK.to(wider), b_KN.to(wider))
    scale, other = scales if len(scales) == 2 else (scales[0], None)
    is_counted = a_MK.is_meta and not is_shape_only(a_MK)  # by its kernels, which the operator hides
    is_plain = type(a_MK) is torch.Tensor and not a_MK.is_meta and not torch.compiler.is_compiling()
    if is_counted or (is_plain and not is_in_torch_dispatch_mode()):
        return _scaled(a_MK, b_KN, scale, other, wider)  # the operator's call takes a tenth of a small matmul
    return scaled_mm(a_MK, b_KN, scale, other, wider)


def _are_bf16(a: Operand | RowOperand, b: Operand | RowOperand) -> bool:
    """Whether a matmul in parts gives the same as one of the full values: only `a` has a rest."""
    has_rest = isinstance(b, RowOperand) and b.rest is not None
    return not has_rest and a.values.dtype == b.values.dtype == torch.bfloat16


def _product_by_rows(a: Operand | RowOperand, b: Operand | RowOperand, dtype: torch.dtype) -> torch.Tensor:
    rest = a.rest if isinstance(a, RowOperand) else None
    b_KN = b.values.T
    a_scale, b_scale = (
        torch.ones((), dtype=torch.float32, device=b_KN.device) if x.scale is None else x.scale
        for x in (a, b)
    )
    return scaled_rows_and_rounded(
        _summed_in_fp32(a.values, b_KN),
        None if rest is None else _summed_in_fp32(rest, b_KN),
        a_scale,
        b_scale,
        dtype,
    )


def _summed_in_fp32(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    if sums_in_fp32(a_MK.device):
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()


def _plain_product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b; on a GPU each row of the result begins at a multiple of 16 bytes.

    The logits of a vocabulary of 50,257 would not. Then this matmul, the two of its gradient (which is
    written over the logits) and the kernels of the loss could only load single elements.
    """
    if is_slow(a_MK):
        return (a_MK.float() @ b_KN.float()).to(a_MK.dtype)
    N, size = b_KN.shape[1], a_MK.element_size()
    if N * size % _VECTOR == 0 or N < _VECTOR or not is_gpu(a_MK.device) or torch.compiler.is_compiling():
        return a_MK @ b_KN
    out_MN = aligned_rows(len(a_MK), N, a_MK)
    return torch.mm(a_MK, b_KN, out=out_MN)


def quantized_operand(q: QTensor, axis: int, other: torch.Tensor | None = None) -> QuantizedOperand:
    """A quantized matrix as an operand whose `axis` (-1 or 0) is contracted.

    `other` holds the same codes, contiguous along the other axis.
    """
    scales = q.scales if q.scale_codes is None else q.scale_codes
    if axis == -1:
        return QuantizedOperand(q.codes, scales, q.tensor_scale, q.cast, None if other is None else other.T)
    scales = scales.T if scales.ndim else scales
    return QuantizedOperand(q.codes.T, scales, q.tensor_scale, q.cast, other)


def tiled_operand(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> TiledOperand | None:
    """A matrix whose `axis` (-1 or 0) is contracted, as an operand that the kernel of its cast lays out.

    An operand whose values do not depend on the axis is laid out along both: packed codes have no transpose.

    Returns:
        None where no kernel does it.
    """
    tiles = quantize_in_tiles(x, cast, axis, context)
    if tiles is None:
        return None
    operand = TiledOperand(x.shape[1 + axis], tiles, cast)
    if not cast.ignores_axis:
        return operand
    again = quantize_in_tiles(x, cast, -1 - axis, context)
    assert again is not None
    return operand._replace(other=TiledOperand(x.shape[-axis], again, cast))


def native_product(
    a: NativeOperand, b: NativeOperand, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """The matmul of (M, K) and (N, K) as (M, N), rounded once to `dtype`.

    `fast` lets Hopper accumulate in fewer bits, as is usual for fprop. Matmuls in blocks still accumulate in
    fp32, as TransformerEngine requires.
    """
    fast = fast and a.cast.element.bits == 8 and not (_in_blocks(a.cast) or _in_blocks(b.cast))
    rows = a.rows, b.rows
    result = torch_scaled_mm(**arguments(a, b), output_dtype=dtype, use_fast_accum=fast)
    return result if result.shape == rows else result[: rows[0], : rows[1]]


def _in_blocks(cast: Cast) -> bool:
    """Whether scales vary along the contraction."""
    return cast.block is not None and cast.block[1] != 0


def arguments(a: NativeOperand, b: NativeOperand) -> dict[str, Any]:
    """The keyword arguments of `scaled_mm` for two operands."""
    a = a if isinstance(a, TiledOperand) else _padded(a)
    b = b if isinstance(b, TiledOperand) else _padded(b)
    types_a, scale_a = _scales(a, b, first=True)
    types_b, scale_b = _scales(b, a, first=False)
    swizzles = None
    if a.cast.scale in TILED:
        swizzles = [SwizzleType.SWIZZLE_32_4_4, *[SwizzleType.NO_SWIZZLE] * (len(types_a) - 1)]
    return {
        "mat_a": _elements(a),
        "mat_b": _elements(b).T,
        "scale_a": scale_a,
        "scale_recipe_a": types_a,
        "swizzle_a": swizzles,
        "scale_b": scale_b,
        "scale_recipe_b": types_b,
        "swizzle_b": swizzles,
    }


def _padded(x: QuantizedOperand) -> QuantizedOperand:
    """Pad rows and columns to sizes that the matrix units support, with zeros for elements and scales."""
    columns = 128 if x.cast.block in ((1, 128), (128, 128)) else 32
    # torch's compiler requires full square blocks, its kernels do not.
    missing = -x.codes.shape[0] % (128 if x.cast.block == (128, 128) else ROWS)
    if not (missing or x.codes.shape[1] % columns):
        return x
    codes = _pad(x.codes, (0, -x.codes.shape[1] % columns, 0, missing))
    scales = x.scales
    if scales.ndim and x.cast.block is not None and x.cast.block[0] == 1:
        scales = _pad(scales, (0, 0, 0, missing))
    return x._replace(codes=codes, scales=scales)


def _pad(x: torch.Tensor, missing: tuple[int, ...]) -> torch.Tensor:
    """`x`, padded with zeros; `x` itself if nothing is missing, because torch's `pad` would copy it."""
    return torch.nn.functional.pad(x, missing) if any(missing) else x


def _elements(x: NativeOperand) -> torch.Tensor:
    codes = x.tiles.codes if isinstance(x, TiledOperand) else pack(along_contraction(x.codes), x.cast.element)
    return codes.view(_dtype_of(x.cast.element))


@cache
def _dtype_of(element: Format) -> torch.dtype:
    return torch_dtype(element) or torch.float4_e2m1fn_x2


def along_contraction(codes: torch.Tensor) -> torch.Tensor:
    """Codes (rows, contraction), each row contiguous: unchanged, or a copy."""
    if codes.is_contiguous():
        return codes
    if codes.T.is_contiguous() and use_kernels(codes):  # torch's copy reads single bytes, rows apart
        from narrowgauge.kernels.triton.product import launch_transposed

        return launch_transposed(codes.T)
    return codes.contiguous()


def _scales(
    x: NativeOperand, other: NativeOperand, first: bool
) -> tuple[list[ScalingType], list[torch.Tensor]]:
    """(types, tensors) of an operand's scales in a matmul with the `other`."""
    if isinstance(x, TiledOperand):
        return _scales_in_tiles(x.cast, x.tiles.scales, x.tiles.tensor_scale)
    rows, scales = x.rows, x.scales
    if x.cast.scale in TILED:
        assert x.cast.block is not None
        scales = tiled(scales.repeat_interleave(x.cast.block[0], 0)[:rows])
        return _scales_in_tiles(x.cast, scales, x.tensor_scale)
    if x.cast.block is None and other.cast.block is None:
        return [ScalingType.TensorWise], [scales.reshape(1)]
    if x.cast.block is None or x.cast.block[1] == 0:
        row_scales = scales.reshape(-1).expand(rows).contiguous()
        return [ScalingType.RowWise], [row_scales.unsqueeze(1 if first else 0)]
    if x.cast.block == (1, 128):
        return [ScalingType.BlockWise1x128], [_row_major(scales.T).T]
    scales = _pad(scales, (0, -scales.shape[1] % 4))
    return [ScalingType.BlockWise128x128], [_row_major(scales).T]


def _scales_in_tiles(
    cast: Cast, scales: torch.Tensor, tensor_scale: torch.Tensor
) -> tuple[list[ScalingType], list[torch.Tensor]]:
    type_, dtype = TILED[cast.scale]
    if cast.scale == "e8m0":
        return [type_], [scales.view(dtype)]
    return [type_, ScalingType.TensorWise], [scales.view(dtype), tensor_scale]


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous, with row-major strides even where a dimension is 1: kernels check them."""
    return x.reshape(-1).view(x.shape)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Bytes of scales (rows, blocks) in tiles, as one contiguous row.

    A tile holds 128 rows of 4 blocks; the entry of row r and block c is its byte 16 (r mod 32) + 4 (r div
    32) + c. Tiles follow each other along the blocks first; missing entries are 0.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, blocks = scales.shape
    scales = _pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = scales.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # (row tile, r div 32, r mod 32, tile, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)

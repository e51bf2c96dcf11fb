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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from narrowgauge.formats import pack, torch_dtype
from narrowgauge.kernels.cast import quantize_in_tiles
from narrowgauge.kernels.dispatch import is_slow, is_traced, sums_in_fp32, use_kernels
from narrowgauge.kernels.product import aligned_rows, scaled_and_rounded
from narrowgauge.quantization import Cast, QTensor, QuantContext
from narrowgauge.quantization import cast as named_cast
from narrowgauge.system.devices import is_gpu, is_shape_only
from narrowgauge.system.torch_compat import ScalingType, SwizzleType, is_in_torch_dispatch_mode
from narrowgauge.system.torch_compat import scaled_mm as torch_scaled_mm

_VECTOR = 16  # bytes of the widest load
UNIT = 16  # dimensions of the result are multiples of this
TILED = {
    "e8m0": (ScalingType.BlockWise1x32, torch.float8_e8m0fnu),
    "e4m3": (ScalingType.BlockWise1x16, torch.float8_e4m3fn),
}

Tensors = tuple[torch.Tensor | None, ...]
#: Forms of an operand.
VALUES, ROWS, CODES, TILES = "values", "rows", "codes", "tiles"
NATIVE = (CODES, TILES)
#: From the tensors that were kept, to the operand.
Restore = Callable[..., "Operand"]


class Operand(NamedTuple):
    """An operand as (rows, contraction), in one of four forms.

    form      elements                      scale                            other tensors
    VALUES    in a wide dtype               0-dim float32, or None for 1
    ROWS      bf16                          float32, one per row             `rest`
    CODES     uint8, one per element        one entry per block, or 0-dim    `outer`
    TILES     uint8, packed and padded      of blocks, in tiles (`tiled`)    `outer`

    VALUES and ROWS are emulated, CODES and TILES native. The values are elements * scale + rest.
    """

    elements: torch.Tensor
    #: Their scale; of native forms uint8 codes if the format of scales has 8 bits, else float32
    scale: torch.Tensor | None = None
    rest: torch.Tensor | None = None  # bf16, the clamped remainder to add back; None for none
    outer: torch.Tensor | None = None  # 0-dim float32, the scale above those of blocks
    form: str = VALUES
    #: The cast of a native operand; fp32 for an emulated one, whose elements are values already
    cast: Cast = named_cast("fp32")
    rows: int = 0  # the rows of TILES without padding
    #: The same operand contracted along the other axis, if it was written twice
    other: "Operand | None" = None

    def values(self) -> torch.Tensor:
        """The values that a matmul sees, of an emulated operand; float32 where it has a scale."""
        if self.scale is None:
            return self.elements
        scale = self.scale.unsqueeze(1) if self.form == ROWS else self.scale
        values = self.elements.float() * scale
        return values if self.rest is None else values + self.rest

    def transposed(self) -> "Operand":
        """The same values along the other axis; those of rows without a separate scale."""
        if self.other is not None:
            return self.other
        assert self.form != TILES, "values that depend on the axis"
        if self.form == ROWS:
            return Operand(self.values().T)
        scale = self.scale.T if self.scale is not None and self.scale.ndim else self.scale
        return Operand(self.elements.T, scale, self.rest, self.outer, self.form, self.cast, self.rows)

    def kept(self) -> tuple[Tensors, Restore]:
        """Its tensors as a backward pass, which transposes it, needs them, and what restores it from them."""
        kept = self
        if self.other is not None:
            kept = self.other if self.form == TILES else self.other.transposed()
        form, cast, rows = kept.form, kept.cast, kept.rows

        def restore(elements: torch.Tensor, scale: Any, rest: Any, outer: Any) -> Operand:
            operand = Operand(elements, scale, rest, outer, form, cast, rows)
            return operand._replace(other=operand) if form == TILES else operand  # laid out along that axis

        return kept[:4], restore


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


def multiply(a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """The matmul of (M, K) and (N, K) as (M, N).

    Native operands return `dtype` (`fast`: see `native_product`), emulated ones that dtype or theirs, if
    wider.
    """
    if a.form in NATIVE and b.form in NATIVE:
        return native_product(a, b, dtype, fast)
    assert {a.form, b.form}.isdisjoint(NATIVE)
    a_MK, b_KN = a.elements, b.elements.T
    if ROWS in (a.form, b.form):
        if b.rest is None and a_MK.dtype == b_KN.dtype == torch.bfloat16:  # in parts, with the same result
            new_one = partial(torch.ones, (), dtype=torch.float32, device=b_KN.device)
            a_scale, b_scale = (new_one() if x.scale is None else x.scale for x in (a, b))
            rest = None if a.rest is None else _summed_in_fp32(a.rest, b_KN)
            y_MN = _summed_in_fp32(a_MK, b_KN)
            return scaled_and_rounded(y_MN, a_scale, dtype, rest=rest, columns=b_scale)
        a, b = (Operand(x.values()) if x.form == ROWS else x for x in (a, b))
        a_MK, b_KN = a.elements, b.elements.T
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


def quantized_operand(q: QTensor, axis: int, other: torch.Tensor | None = None) -> Operand:
    """A quantized matrix as an operand whose `axis` (-1 or 0) is contracted.

    `other` holds the same codes, contiguous along the other axis.
    """
    scales = q.scales if q.scale_codes is None else q.scale_codes
    operand = Operand(q.codes, scales, None, q.tensor_scale, CODES, q.cast)
    operand = operand if axis == -1 else operand.transposed()
    if other is None:
        return operand
    along = Operand(other.T if axis == -1 else other, operand.transposed().scale, None, *operand[3:6])
    return Operand(*operand[:7], along)


def tiled_operand(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> Operand | None:
    """A matrix whose `axis` (-1 or 0) is contracted, as an operand that the kernel of its cast lays out.

    An operand whose values do not depend on the axis is laid out along both: packed codes have no transpose.

    Returns:
        None where no kernel does it.
    """
    found: list[Operand] = []
    for along in (axis, -1 - axis) if cast.ignores_axis else (axis,):
        tiles = quantize_in_tiles(x, cast, along, context)
        if tiles is None:
            return None
        codes, scales, outer = tiles
        found.append(Operand(codes, scales, None, outer, TILES, cast, x.shape[1 + along]))
    return found[0]._replace(other=found[1]) if len(found) > 1 else found[0]


def native_product(a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """The matmul of (M, K) and (N, K) as (M, N), rounded once to `dtype`.

    `fast` lets Hopper accumulate in fewer bits, as is usual for fprop. Matmuls in blocks still accumulate in
    fp32, as TransformerEngine requires.
    """
    in_blocks = any(x.cast.block is not None and x.cast.block[1] for x in (a, b))
    fast = fast and a.cast.element.bits == 8 and not in_blocks
    rows = a.rows or a.elements.shape[0], b.rows or b.elements.shape[0]
    result = torch_scaled_mm(**arguments(a, b), output_dtype=dtype, use_fast_accum=fast)
    return result if result.shape == rows else result[: rows[0], : rows[1]]


def arguments(a: Operand, b: Operand) -> dict[str, Any]:
    """The keyword arguments of `scaled_mm` for two operands."""
    a, b = a if a.form == TILES else _padded(a), b if b.form == TILES else _padded(b)
    found: dict[str, Any] = {"mat_a": _elements(a), "mat_b": _elements(b).T}
    for name, types, scales in (("a", *_scales(a, b, first=True)), ("b", *_scales(b, a, first=False))):
        swizzles = [SwizzleType.SWIZZLE_32_4_4, *[SwizzleType.NO_SWIZZLE] * (len(types) - 1)]
        found |= {f"scale_{name}": scales, f"scale_recipe_{name}": types}
        found[f"swizzle_{name}"] = swizzles if a.cast.scale in TILED else None
    return found


def _padded(x: Operand) -> Operand:
    """Pad rows and columns to sizes that the matrix units support, with zeros for elements and scales."""
    columns = 128 if x.cast.block in ((1, 128), (128, 128)) else 32
    # torch's compiler requires full square blocks, its kernels do not.
    missing = -x.elements.shape[0] % (128 if x.cast.block == (128, 128) else UNIT)
    if not (missing or x.elements.shape[1] % columns):
        return x
    codes, scales = _pad(x.elements, (0, -x.elements.shape[1] % columns, 0, missing)), x.scale
    if scales is not None and scales.ndim and x.cast.block is not None and x.cast.block[0] == 1:
        scales = _pad(scales, (0, 0, 0, missing))
    return x._replace(elements=codes, scale=scales)


def _pad(x: torch.Tensor, missing: tuple[int, ...]) -> torch.Tensor:
    """`x`, padded with zeros; `x` itself if nothing is missing, because torch's `pad` would copy it."""
    return torch.nn.functional.pad(x, missing) if any(missing) else x


def _elements(x: Operand) -> torch.Tensor:
    """The packed codes, in the dtype that torch multiplies."""
    codes = x.elements if x.form == TILES else pack(along_contraction(x.elements), x.cast.element)
    return codes.view(torch_dtype(x.cast.element) or torch.float4_e2m1fn_x2)


def along_contraction(codes: torch.Tensor) -> torch.Tensor:
    """Codes (rows, contraction), each row contiguous: unchanged, or a copy."""
    if codes.is_contiguous():
        return codes
    if codes.T.is_contiguous() and use_kernels(codes):  # torch's copy reads single bytes, rows apart
        from narrowgauge.kernels.triton.product import launch_transposed

        return launch_transposed(codes.T)
    return codes.contiguous()


def _scales(x: Operand, other: Operand, first: bool) -> tuple[list[ScalingType], list[torch.Tensor]]:
    """(types, tensors) of an operand's scales in a matmul with the `other`."""
    rows, scales, outer = x.rows or x.elements.shape[0], x.scale, x.outer
    assert scales is not None
    if x.cast.scale in TILED:
        assert outer is not None
        if x.form == CODES:
            assert x.cast.block is not None
            scales = tiled(scales.repeat_interleave(x.cast.block[0], 0)[:rows])
        type_, dtype = TILED[x.cast.scale]
        above = [] if x.cast.scale == "e8m0" else [outer]
        return [type_, *(ScalingType.TensorWise for _ in above)], [scales.view(dtype), *above]
    if x.cast.block is None and other.cast.block is None:
        return [ScalingType.TensorWise], [scales.reshape(1)]
    if x.cast.block is None or x.cast.block[1] == 0:
        row_scales = scales.reshape(-1).expand(rows).contiguous()
        return [ScalingType.RowWise], [row_scales.unsqueeze(1 if first else 0)]
    if x.cast.block == (1, 128):
        return [ScalingType.BlockWise1x128], [_row_major(scales.T).T]
    scales = _pad(scales, (0, -scales.shape[1] % 4))
    return [ScalingType.BlockWise128x128], [_row_major(scales).T]


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

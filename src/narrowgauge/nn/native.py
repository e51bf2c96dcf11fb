"""A product of narrow numbers on the hardware's own units, through `torch.nn.functional.scaled_mm`.

The numbers are those of `quantize`, the same codes and scales that are emulated elsewhere; only the order
in which products are summed is the hardware's. This file does layout: both operands are stored in bytes along
the contraction, and scales in the order in which their kernel reads them:

    one a tensor      one float32
    one a row         float32 (M, 1) of the first operand, (1, N) of the second
    1 x 128           float32, one entry a row and block, rows next to each other
    128 x 128         float32, blocks along the contraction next to each other, their number padded to 4
    1 x 32, 1 x 16    bytes in tiles of 128 rows x 4 blocks (`tiled`); NVFP4 adds its tensor scale

Dimensions that the units do not take are padded with zeros, which changes no sum, and cut off again.
"""

from typing import Any, NamedTuple

import torch

from narrowgauge.formats import pack, torch_dtype
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.quantization import Cast, QTensor
from narrowgauge.torch_compat import ScalingType, SwizzleType, scaled_mm

ROWS = 16  # a dimension of the result is a multiple of this
TILED = {
    "e8m0": (ScalingType.BlockWise1x32, torch.float8_e8m0fnu),
    "e4m3": (ScalingType.BlockWise1x16, torch.float8_e4m3fn),
}


class QuantizedOperand(NamedTuple):
    """An operand as (rows, contraction) in narrow numbers.

    Attributes:
        codes: uint8, one an element.
        scales: One entry a block, or 0-dim: uint8 codes if their format has 8 bits, else float32.
        tensor_scale: 0-dim float32.
        cast: The cast of the operand.
        other: The same codes as (contraction, rows), if they were written twice.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    cast: Cast
    other: torch.Tensor | None = None

    def transposed(self) -> "QuantizedOperand":
        """The same numbers along the other axis."""
        scales = self.scales.T if self.scales.ndim else self.scales
        codes = self.codes.T if self.other is None else self.other
        return self._replace(codes=codes, scales=scales, other=None)


def quantized_operand(q: QTensor, axis: int, other: torch.Tensor | None = None) -> QuantizedOperand:
    """A quantized matrix as an operand whose `axis` (-1 or 0) is contracted.

    `other` holds the same codes once more, contiguous along the other axis.
    """
    scales = q.scales if q.scale_codes is None else q.scale_codes
    codes = QuantizedOperand(q.codes, scales, q.tensor_scale, q.cast)
    codes = codes if axis == -1 else codes.transposed()
    return codes if other is None else codes._replace(other=other.T if axis == -1 else other)


def native_product(
    a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """The product of (M, K) and (N, K) as (M, N), rounded once to `dtype`.

    `fast` lets Hopper sum in fewer bits, as is usual for the forward product. A product in blocks is summed
    in fp32 all the same, as TransformerEngine demands.
    """
    m, n = a.codes.shape[0], b.codes.shape[0]
    fast = fast and a.cast.element.bits == 8 and not (_in_blocks(a.cast) or _in_blocks(b.cast))
    result = scaled_mm(**arguments(a, b), output_dtype=dtype, use_fast_accum=fast)
    return result[:m, :n]


def _in_blocks(cast: Cast) -> bool:
    """Whether scales follow each other along the contraction."""
    return cast.block is not None and cast.block[1] != 0


def arguments(a: QuantizedOperand, b: QuantizedOperand) -> dict[str, Any]:
    """The keyword arguments of `scaled_mm` for two operands."""
    a, b = _padded(a), _padded(b)
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
    """Pad rows and columns to numbers that the units take, with zeros for elements and scales."""
    columns = 128 if x.cast.block in ((1, 128), (128, 128)) else 32
    # torch's compiler wants full square blocks, its kernels do not.
    missing = -x.codes.shape[0] % (128 if x.cast.block == (128, 128) else ROWS)
    codes = _pad(x.codes, (0, -x.codes.shape[1] % columns, 0, missing))
    scales = x.scales
    if scales.ndim and x.cast.block is not None and x.cast.block[0] == 1:
        scales = _pad(scales, (0, 0, 0, missing))
    return x._replace(codes=codes, scales=scales)


def _pad(x: torch.Tensor, missing: tuple[int, ...]) -> torch.Tensor:
    """`x`, padded with zeros; where nothing is missing itself, for torch's `pad` would copy it."""
    return torch.nn.functional.pad(x, missing) if any(missing) else x


def _elements(x: QuantizedOperand) -> torch.Tensor:
    codes = pack(along_contraction(x.codes), x.cast.element)
    return codes.view(torch_dtype(x.cast.element) or torch.float4_e2m1fn_x2)


def along_contraction(codes: torch.Tensor) -> torch.Tensor:
    """Codes (rows, contraction), each row contiguous: as they are, or a copy."""
    if codes.is_contiguous():
        return codes
    if codes.T.is_contiguous() and use_kernels(codes):  # torch's own copy reads single bytes, rows apart
        from narrowgauge.kernels.triton.product import launch_transposed

        return launch_transposed(codes.T)
    return codes.contiguous()


def _scales(
    x: QuantizedOperand, other: QuantizedOperand, first: bool
) -> tuple[list[ScalingType], list[torch.Tensor]]:
    """(types, tensors) of an operand's scales in a product with the `other`."""
    rows, scales = x.codes.shape[0], x.scales
    if x.cast.scale in TILED:
        assert x.cast.block is not None
        type_, dtype = TILED[x.cast.scale]
        scales = tiled(scales.repeat_interleave(x.cast.block[0], 0)[:rows]).view(dtype)
        if x.cast.scale == "e8m0":
            return [type_], [scales]
        return [type_, ScalingType.TensorWise], [scales, x.tensor_scale]
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
    """`x`, contiguous, with row-major strides where a dimension is 1, too: kernels check them."""
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

"""A product of narrow numbers on the hardware's own units, through `torch.nn.functional.scaled_mm`.

The numbers are those of `quantize`, the same codes and scales that are emulated elsewhere; only the order
in which the products are summed belongs to the hardware. What is done here is layout: both operands lie along
the contraction, in bytes, and each kind of scale lies as its kernel reads it:

    one a tensor      one float32
    one a row         float32 (M, 1) of the first operand, (1, N) of the second
    1 x 128           float32, one entry a row and block, rows next to each other
    128 x 128         float32, blocks along the contraction next to each other, their number padded to 4
    1 x 32, 1 x 16    bytes in tiles of 128 rows x 4 blocks (`tiled`); NVFP4 has its tensor scale beside them

Dimensions that the units do not take are padded with zeros, which changes no sum, and cut off again.
"""

from typing import Any, NamedTuple

import torch

from narrowgauge.formats import pack, torch_dtype
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
        scales: one entry a block, or 0-dim: uint8 codes where their format has 8 bits, else float32.
        tensor_scale: 0-dim float32.
        other: the same codes as (contraction, rows), where they were written twice.
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

    `other` are its codes again, which lie next to each other along the other axis.
    """
    scales = q.scales if q.scale_codes is None else q.scale_codes
    codes = QuantizedOperand(q.codes, scales, q.tensor_scale, q.cast)
    codes = codes if axis == -1 else codes.transposed()
    return codes if other is None else codes._replace(other=other.T if axis == -1 else other)


def native_product(
    a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """The product of (M, K) and (N, K) as (M, N), rounded once to `dtype`.

    `fast` lets Hopper add up in fewer bits, as is usual for the forward product.
    """
    m, n = a.codes.shape[0], b.codes.shape[0]
    fast = fast and a.cast.element.bits == 8 and a.cast.scale == "fp32"
    result = scaled_mm(**arguments(a, b), output_dtype=dtype, use_fast_accum=fast)
    return result[:m, :n]


def arguments(a: QuantizedOperand, b: QuantizedOperand) -> dict[str, Any]:
    """What `scaled_mm` is called with."""
    a, b = _padded(a), _padded(b)
    kind_a, scale_a = _scales(a, b, first=True)
    kind_b, scale_b = _scales(b, a, first=False)
    swizzles = None
    if a.cast.scale in TILED:
        swizzles = [SwizzleType.SWIZZLE_32_4_4, *[SwizzleType.NO_SWIZZLE] * (len(kind_a) - 1)]
    return {
        "mat_a": _elements(a),
        "mat_b": _elements(b).T,
        "scale_a": scale_a,
        "scale_recipe_a": kind_a,
        "swizzle_a": swizzles,
        "scale_b": scale_b,
        "scale_recipe_b": kind_b,
        "swizzle_b": swizzles,
    }


def _padded(x: QuantizedOperand) -> QuantizedOperand:
    """With rows and columns that the units take; new rows have zeros for elements and scales."""
    columns = 128 if x.cast.block in ((1, 128), (128, 128)) else 32
    # torch's compiler wants whole square blocks, its kernels do not.
    missing = -x.codes.shape[0] % (128 if x.cast.block == (128, 128) else ROWS)
    codes = torch.nn.functional.pad(x.codes, (0, -x.codes.shape[1] % columns, 0, missing))
    scales = x.scales
    if scales.ndim and x.cast.block is not None and x.cast.block[0] == 1:
        scales = torch.nn.functional.pad(scales, (0, 0, 0, missing))
    return x._replace(codes=codes, scales=scales)


def _elements(x: QuantizedOperand) -> torch.Tensor:
    codes = pack(x.codes.contiguous(), x.cast.element)
    return codes.view(torch_dtype(x.cast.element) or torch.float4_e2m1fn_x2)


def _scales(
    x: QuantizedOperand, other: QuantizedOperand, first: bool
) -> tuple[list[ScalingType], list[torch.Tensor]]:
    """(kinds, tensors) of an operand's scales, next to the other operand's."""
    rows, scales = x.codes.shape[0], x.scales
    if x.cast.scale in TILED:
        assert x.cast.block is not None
        kind, dtype = TILED[x.cast.scale]
        scales = tiled(scales.repeat_interleave(x.cast.block[0], 0)[:rows]).view(dtype)
        if x.cast.scale == "e8m0":
            return [kind], [scales]
        return [kind, ScalingType.TensorWise], [scales, x.tensor_scale]
    if x.cast.block is None and other.cast.block is None:
        return [ScalingType.TensorWise], [scales.reshape(1)]
    if x.cast.block is None or x.cast.block[1] == 0:
        every = scales.reshape(-1).expand(rows).contiguous()
        return [ScalingType.RowWise], [every.unsqueeze(1 if first else 0)]
    if x.cast.block == (1, 128):
        return [ScalingType.BlockWise1x128], [_row_major(scales.T).T]
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
    return [ScalingType.BlockWise128x128], [_row_major(scales).T]


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and with the strides that say so where a dimension is 1, which kernels look at."""
    return x.reshape(-1).view(x.shape)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Bytes of scales (rows, blocks) in tiles, as one contiguous row.

    A tile holds 128 rows of 4 blocks; in it the entry of row r and block c is byte
    16 (r mod 32) + 4 (r div 32) + c. Tiles follow each other along the blocks first; what is missing is 0.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, blocks = scales.shape
    scales = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = scales.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # (row tile, r div 32, r mod 32, tile, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)

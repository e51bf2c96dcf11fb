"""Quantization and emulation in one pass over a matrix, where a GPU has Triton.

The references are `quantization.quantize` and `quantization.emulate`, which give the same codes, scales and
numbers; only a Hadamard transform may differ in its last bit, as its sums have no order. Bytes for each
element of a bf16 tensor, read and written (the reference makes a dozen passes in float32):

    blocks (MX, FP8 1x128, 16x16 ...)       2 + 1 for codes, 2 + 2 for numbers (4 where their scale is fp32)
    NVFP4                                   2 more: its tensor scale wants the largest magnitude first
    a scale a row, 128 x 128, or a tensor   2 more for that; a tensor whose producer told it none (`largest`)
    codes along both axes, from one read    1 more for the second

Left to the references: tensors that several processes hold together, outliers kept apart, random bits that
are not a `RandomStream`'s, tensors that are no matrices, and compiled code, whose compiler fuses these
passes.
"""

from typing import Any

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.quantization import Cast, QTensor, TensorShard
from narrowgauge.quantization import emulate as emulate_plainly
from narrowgauge.quantization import quantize as quantize_plainly
from narrowgauge.quantization.scale_and_round import Generator


def _has_kernel(x: torch.Tensor, cast: Cast, generator: Generator, part: TensorShard | None) -> bool:
    of_state = cast.expand or cast.codebook or cast.element.bits > 8
    of_others = part is not None or cast.outliers or cast.compensate
    is_random = cast.rounding == "stochastic"
    return (
        x.ndim == 2
        and cast.is_scaled
        and not (of_state or of_others)
        and cast.hadamard in (0, 16, 32, 64, 128)
        and (isinstance(generator, RandomStream) or not is_random)
        and use_kernels(x)
    )


def quantize(
    x: torch.Tensor,
    cast: Cast,
    axis: int = -1,
    generator: Generator = None,
    signs: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
    part: TensorShard | None = None,
    both: bool = False,
) -> tuple[QTensor, torch.Tensor | None]:
    """`quantization.quantize` of a matrix; `axis` is -1 or 0.

    Returns:
        The quantized tensor and, with `both`, the same codes next to each other along the other axis, where
        a kernel writes both (None elsewhere; only casts whose numbers do not depend on the axis have them).
    """
    if _has_kernel(x, cast, generator, part):
        from narrowgauge.kernels.triton.cast_launch import quantized

        return quantized(x, cast, axis, _stream(generator), signs, encode_scale, both)
    options: dict[str, Any] = {"generator": generator, "signs": signs, "encode_scale": encode_scale}
    return quantize_plainly(x, cast, axis, **options, part=part), None


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
    """`quantization.emulate` of a matrix; `axis` is -1 or 0."""
    if _has_kernel(x, cast, generator, part):
        from narrowgauge.kernels.triton.cast_launch import emulated

        return emulated(x, cast, axis, dtype, _stream(generator), signs, encode_scale)
    return emulate_plainly(x, cast, axis, dtype, generator, signs, encode_scale, part)


def _stream(generator: Generator) -> RandomStream | None:
    return generator if isinstance(generator, RandomStream) else None

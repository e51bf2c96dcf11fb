"""The epilogue of an emulated matmul: applies the operands' separate scales, and rounds once.

The matmul accumulates in fp32, which is what torch writes on a GPU (`nn.gemm`). A kernel applies the scales
and rounds in one pass.
"""

import torch

from narrowgauge.kernels.dispatch import use_kernels


def scaled_and_rounded(
    product: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, other: torch.Tensor | None = None
) -> torch.Tensor:
    """product * (scale * other), rounded once to `dtype`; contiguous fp32, and 0-dim fp32 scales.

    Emulated operands have separate tensor scales (`nn.gemm`). They are applied to the accumulator, which
    torch's matmul on a GPU writes in fp32. Bytes per element, for a 2-byte result: 4 + 4 and 4 + 2 in plain
    torch, 4 + 2 in one pass.
    """
    if use_kernels(product):
        from narrowgauge.kernels.triton.product import launch_scaled

        return launch_scaled(product, scale, dtype, other)
    return (product * (scale if other is None else scale * other)).to(dtype)


def scaled_rows_and_rounded(
    product: torch.Tensor,
    rest: torch.Tensor | None,
    rows: torch.Tensor,
    columns: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(product * rows + rest) * columns, computed in fp32 and rounded once to `dtype`.

    Args:
        product, rest: Contiguous fp32 (M, N).
        rows, columns: fp32 scales of the rows and the columns, or a single 0-dim one for all.
        dtype: The dtype of the result.
    """
    if use_kernels(product):
        from narrowgauge.kernels.triton.product import launch_scaled_rows

        return launch_scaled_rows(product, rest, rows, columns, dtype)
    product = product * (rows.unsqueeze(1) if rows.ndim else rows)
    return ((product if rest is None else product + rest) * columns).to(dtype)


def aligned_rows(rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Memory of (rows, width) in which each row begins at a multiple of 128 bytes.

    Otherwise GEMMs and kernels would read and write single elements for a vocabulary of 50257.
    """
    numbers = 128 // like.element_size()
    return like.new_empty(rows, -(-width // numbers) * numbers)[:, :width]

"""The epilogue of an emulated matmul: applies the operands' separate scales, and rounds once.

The matmul accumulates in fp32, which is what torch writes on a GPU (`nn.gemm`). A kernel applies the scales
and rounds in one pass.
"""

import torch

from narrowgauge.kernels.dispatch import use_kernels


def scaled_and_rounded(
    product: torch.Tensor,
    rows: torch.Tensor,
    dtype: torch.dtype,
    other: torch.Tensor | None = None,
    rest: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """(product * (rows * other) + rest) * columns, computed in fp32 and rounded once to `dtype`.

    Emulated operands have separate scales (`nn.gemm`). They are applied to the accumulator, which torch's
    matmul on a GPU writes in fp32. Bytes per element, for a 2-byte result: 4 + 4 and 4 + 2 in plain torch,
    4 + 2 in one pass.

    Args:
        product, rest: Contiguous fp32 (M, N).
        rows, columns: fp32 scales of the rows and the columns, or a single 0-dim one for all.
        dtype: The dtype of the result.
        other: Another scale for all.
    """
    if use_kernels(product):
        from narrowgauge.kernels.triton.product import launch_scaled

        return launch_scaled(product, rows, dtype, other, rest, columns)
    rows = rows if other is None else rows * other
    product = product * (rows.unsqueeze(1) if rows.ndim else rows)
    product = product if rest is None else product + rest
    return (product if columns is None else product * columns).to(dtype)


def aligned_rows(rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Memory of (rows, width) in which each row begins at a multiple of 128 bytes.

    Otherwise GEMMs and kernels would read and write single elements for a vocabulary of 50257.
    """
    numbers = 128 // like.element_size()
    return like.new_empty(rows, -(-width // numbers) * numbers)[:, :width]

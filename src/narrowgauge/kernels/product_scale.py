"""The scale of a product: c = (a @ b) * scale, rounded once, from the fp32 sums that a product wrote.

A product of emulated operands has its tensor scales apart (`nn.gemm`). They belong to the accumulator, before
the result is rounded. On a GPU torch's product writes the accumulator in fp32, and one pass does the rest.

Bytes an element, for a 2-byte result: product by scale 4+4, rounding 4+2 = 14 in plain torch, 4+2 = 6 here.
"""

import torch
from torch import Tensor

from narrowgauge.kernels.dispatch import use_kernels


def scaled_and_rounded(product: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """product * scale, rounded once to `dtype`; the product is contiguous fp32, the scale 0-dim fp32."""
    if use_kernels(product):
        from narrowgauge.kernels.triton.product_scale import launch_scaled

        return launch_scaled(product, scale, dtype)
    return (product * scale).to(dtype)

"""A product's scale and its rounding, by tiles of any matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import narrow
from narrowgauge.kernels.triton.launch import launch

#: Elements of a tile, 16 a thread: four loads of 16 bytes from fp32.
TILE = 2048


@triton.jit
def scale_and_round(product_ptr, scale_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """product * scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scaled = tl.load(product_ptr + at, inside, 0) * tl.load(scale_ptr)
    tl.store(out_ptr + at, narrow(scaled, out_ptr.dtype.element_ty), inside)


def launch_scaled(product: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """product * scale in `dtype`, in the shape of `product`, which is contiguous."""
    out = torch.empty_like(product, dtype=dtype)
    launch(
        scale_and_round,
        (triton.cdiv(product.numel(), TILE),),
        product,
        scale,
        out,
        product.numel(),
        writes="out_ptr",
        BLOCK=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out

"""Random signs in one launch, where plain operations take twenty on as many numbers as a group has."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import narrow
from narrowgauge.kernels.triton.launch import launch
from narrowgauge.kernels.triton.rounding import bits_of


@triton.jit
def random_signs(key_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """1 - 2 (bit 0 of the random bits of each element)."""
    at = tl.arange(0, BLOCK)
    bits = bits_of(tl.load(key_ptr), tl.load(key_ptr + 1), at.to(tl.int64))
    signs = 1.0 - 2.0 * (bits & 1).to(tl.float32)
    tl.store(out_ptr + at, narrow(signs, out_ptr.dtype.element_ty), at < size)


def launch_signs(key: Tensor, size: int) -> Tensor:
    """The signs of `size` elements of a stream whose two int32 words are `key`: +1 or -1, in bf16."""
    signs = torch.empty(size, dtype=torch.bfloat16, device=key.device)
    block = max(16, triton.next_power_of_2(size))
    launch(
        random_signs,
        (1,),
        key,
        signs,
        size,
        writes="out_ptr",
        BLOCK=block,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return signs

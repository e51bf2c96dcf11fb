"""Rotary positions (Su et al., arXiv 2104.09864): a pair (x[i], x[i + H/2]) of a head is turned by an angle.

    y[i]       = x[i] * cos - x[i + H/2] * sin
    y[i + H/2] = x[i + H/2] * cos + x[i] * sin          fp32, rounded once to the dtype of x

Backward it is turned back by the same angle, in fp32 and rounded once; torch's own derivative of the lines
above rounds each product to the dtype of x and then their sum, as the products' operands were of that dtype.

The kernel reads the heads in place, a slice of what the qkv product wrote, and writes them in the same order
of axes, token by token, which is how attention reads them and how their gradient returns.

Bytes an element, 2-byte heads:

    forward    separate   four products 2+4 and two sums 8+4 (of halves), side by side 4+4, rounding 4+2    38
               fused      2+2, the angles from the cache                                                     4
    backward   separate   widening 2+4, a sign 4+4, four products 4+4 with their rounding 4+2 and two
                          sums 4+2 (of halves), side by side 2+2                                            48
               fused      2+2                                                                                4

Legend: B sequences, N heads, T tokens, H head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.kernels.dispatch import use_kernels


def rotary(x_BNTH: Tensor, table: Tensor) -> Tensor:
    """Turn each pair of each head by the angle of its position.

    Args:
        x_BNTH: The heads.
        table: Cosines and sines, fp32: [2, T, H/2], or [2, B, 1, T, H/2] where each sequence has its own.

    Returns:
        The turned heads, in the dtype of `x_BNTH`.
    """
    if use_kernels(x_BNTH):
        turned: Tensor = _Rotary.apply(x_BNTH, table)
        return turned
    return reference(x_BNTH, table)


def reference(x_BNTH: Tensor, table: Tensor) -> Tensor:
    """`rotary` in plain torch."""
    cos, sin = table.unbind()
    a, b = x_BNTH.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BNTH.dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BNTH: Tensor, table: Tensor) -> Tensor:
        from narrowgauge.kernels.triton.rotary import launch_rotary

        ctx.save_for_backward(table)
        return launch_rotary(in_rows(x_BNTH), in_rows(table), is_back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor, None]:
        from narrowgauge.kernels.triton.rotary import launch_rotary

        (table,) = ctx.saved_tensors
        return launch_rotary(in_rows(grad_BNTH), in_rows(table), is_back=True), None


def in_rows(x: Tensor) -> Tensor:
    """`x`, or a copy, with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()

"""SwiGLU and GELU between the two products of an MLP, each one pass forward and one backward.

    swiglu     y = silu(gate) * up                silu(g) = g / (1 + exp(-g))
               dgate = dy * up * s * (1 + g * (1 - s)),  s = 1 / (1 + exp(-g))        dup = dy * silu(gate)
    gelu       y = x * s(2u),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
               dx = dy * (s + x * s * (1 - s) * 2u')

Torch computes each operation in fp32 and rounds its result to the dtype: silu is rounded before it is
multiplied, and dy * up before the slope of silu. The SwiGLU kernel rounds at the same places, so it gives
torch's bits wherever its exponential does: on a GPU it calls the function that torch calls; the interpreter
calls numpy's, which differs from torch's on a CPU by an ulp of fp32 at times, as any two libraries do.

GELU's tanh form is 0.5 x (1 + tanh(u)) = x * sigmoid(2u). The kernel takes the latter, which does not cancel
where x is negative: it is nearer to the formula than torch is, and differs from it by no more than the error
of torch's 1 + tanh(u), 2^-24 of x.

Bytes an element of [.., F], in a 2-byte dtype:

    swiglu forward     apart   silu 2+2, product 4+2                                       10
                       here    gate, up 4; y 2                                              6
           backward    apart   two products 4+2 each, silu 4+2, side by side 4+4           26
                       here    dy 2, gate, up 4; their gradients 4                         10
    gelu               torch's own are one pass each, 4 and 6; here the same

For the backward pass it keeps gate and up only, not silu(gate): 4 bytes an element, not 6. The kernels tell
the largest magnitude of what they write (`kernels.largest`): of y, for the product that reads it, and of the
gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowgauge.kernels.amax_cache import attach_amax
from narrowgauge.kernels.dispatch import use_kernels


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2F], the gate first -> [..., F] in its dtype; kernels tell max |y|."""
    if not use_kernels(gate_up):
        return swiglu_reference(gate_up)
    y, largest = _SwiGLU.apply(gate_up)
    attach_amax(y, largest)
    return y


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, in the shape and dtype of `x`; kernels tell max |y|."""
    if not use_kernels(x):
        return gelu_reference(x)
    y, largest = _GELU.apply(x)
    attach_amax(y, largest)
    return y


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def gelu_reference(x: Tensor) -> Tensor:
    """The same in plain torch."""
    return nn.functional.gelu(x, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        from narrowgauge.kernels.triton.activation import launch_swiglu

        ctx.save_for_backward(gate_up)
        y, largest = launch_swiglu(gate_up.contiguous())
        ctx.mark_non_differentiable(largest)
        return y, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: None) -> Tensor:
        from narrowgauge.kernels.triton.activation import launch_swiglu_backward

        (gate_up,) = ctx.saved_tensors
        grad, largest = launch_swiglu_backward(dy.contiguous(), gate_up.contiguous())
        attach_amax(grad, largest)
        return grad


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        from narrowgauge.kernels.triton.activation import launch_gelu

        ctx.save_for_backward(x)
        y, largest = launch_gelu(x.contiguous())
        ctx.mark_non_differentiable(largest)
        return y, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: None) -> Tensor:
        from narrowgauge.kernels.triton.activation import launch_gelu_backward

        (x,) = ctx.saved_tensors
        dx, largest = launch_gelu_backward(dy.contiguous(), x.contiguous())
        attach_amax(dx, largest)
        return dx

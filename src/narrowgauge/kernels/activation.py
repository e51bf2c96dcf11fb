"""SwiGLU and GELU between the two matmuls of an MLP, each one pass forward and one backward.

    swiglu     y = silu(gate) * up                silu(g) = g / (1 + exp(-g))
               dgate = dy * up * s * (1 + g * (1 - s)),  s = 1 / (1 + exp(-g))        dup = dy * silu(gate)
    gelu       y = x * s(2u),  u = sqrt(2 / pi) * (x + 0.044715 x^3)
               dx = dy * (s + x * s * (1 - s) * 2u')

Torch computes each operation in fp32 and rounds its result to the dtype: silu is rounded before it is
multiplied, and dy * up before the slope of silu. The SwiGLU kernel rounds at the same places, so it matches
torch bit for bit wherever its exponential does: on a GPU it calls the same function as torch; the interpreter
calls numpy's, which at times differs from torch's on a CPU by an fp32 ulp, as any two libraries do.

GELU's tanh form is 0.5 x (1 + tanh(u)) = x * sigmoid(2u). The kernel uses the latter, which does not cancel
for negative x: it is closer to the formula than torch is, and differs from torch by no more than the error of
torch's 1 + tanh(u), 2^-24 of x.

Bytes per element of [.., F], in a 2-byte dtype:

    swiglu forward     separate silu 2+2, multiply 4+2                                      10
                       fused    gate, up 4; y 2                                              6
           backward    separate two multiplies 4+2 each, silu 4+2, concatenation 4+4        26
                       fused    dy 2, gate, up 4; their gradients 4                         10
    gelu               torch's kernels are one pass each, 4 and 6; this kernel's too

For the backward pass SwiGLU keeps only gate and up, not silu(gate): 4 bytes per element instead of 6. The
kernels also compute the amax of y, for the matmul that reads it, and of the gradient (`kernels.amax`).
"""

from torch import Tensor, nn

from narrowgauge.kernels.dispatch import use_kernels


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2F], the gate first -> [..., F] in its dtype."""
    if not use_kernels(gate_up):
        return swiglu_reference(gate_up)
    from narrowgauge.kernels.triton import activation as on_gpu

    y: Tensor = on_gpu.Activation.apply(gate_up, on_gpu.swiglu)
    return y


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, in the shape and dtype of `x`."""
    if not use_kernels(x):
        return gelu_reference(x)
    from narrowgauge.kernels.triton import activation as on_gpu

    y: Tensor = on_gpu.Activation.apply(x, on_gpu.gelu)
    return y


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def gelu_reference(x: Tensor) -> Tensor:
    """`gelu` in plain torch."""
    return nn.functional.gelu(x, approximate="tanh")

"""Adds the gradient of a micro-batch to a gradient kept in FP8 codes: one sum, rounded once.

    x = decode * code + dw          dw alone, if nothing has been added since the gradient was cleared
    encode = from max |x|           times the pre-scaling factor, if the cast has one
    code = Q(encode * x)            with random bits, so that small values are not lost on average

The reference is `GradientState.add`: decode, add, compute the amax and the overflow, round.

Bytes per element of a bf16 dw, over separate torch operations and over the two launches (the second reads
again, because a scale is known only after the last element; `kernels.adamw` does the same):

    separate    about 290      widen 6, decode 87, sum 12, magnitudes 12, overflow 14, round 159
    fused       2+1 and 2+1+1

Before it is added, the gradient of a weight in FP4 is multiplied by the slope of rounding (arXiv 2501.17116;
`through_rounding`): 4 + 2 + 4 bytes per element in one pass, 90 as torch operations.
"""

from torch import Tensor

from narrowgauge.formats import RandomStream
from narrowgauge.kernels.adamw import supports
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.quantization import Cast, GradientState, QuantContext, estimator_slope


def add_gradient(gradient: GradientState, dw: Tensor, stream: RandomStream | None) -> None:
    """Add to a quantized gradient, by the kernel if it supports it.

    Args:
        gradient: The gradient; a sharded one uses the reference.
        dw: The addend, of the same shape, in any float dtype.
        stream: The random bits of a cast that rounds stochastically; without them it rounds to nearest.
    """
    if not _has_kernel(gradient, dw):
        gradient.add(dw.float(), stream)
        return
    from narrowgauge.kernels.triton.gradient_sum import launch_sum

    if gradient.prescale is not None and gradient.is_empty:
        gradient.prescale.begin_step()
    launch_sum(gradient, dw, stream)
    gradient.count_sum()


def _has_kernel(gradient: GradientState, dw: Tensor) -> bool:
    is_in_bytes = gradient.cast.is_scaled and gradient.cast.element.bits == 8
    return is_in_bytes and gradient.wide is None and use_kernels(dw) and supports(gradient)


def through_rounding(dw_NK: Tensor, w_NK: Tensor, cast: Cast, context: QuantContext) -> Tensor:
    """The gradient of a weight before rounding, from that of the rounded weight: times the slope, in fp32.

    Args:
        dw_NK: The gradient.
        w_NK: The weight in high precision.
        cast: Its cast, with a differentiable estimator (`quantization.estimator_slope`).
        context: The context; it has the shard if the weight is sharded.
    """
    has_rows = cast.block == (1, 0) and w_NK.stride(1) == 1 and dw_NK.is_contiguous()
    if not (has_rows and context.shard is None and cast.scale == "fp32" and use_kernels(w_NK)):
        return dw_NK * estimator_slope(w_NK, cast, -1, context)
    from narrowgauge.kernels.triton.fp4_rows import launch_slope

    return launch_slope(w_NK.detach(), dw_NK, cast)

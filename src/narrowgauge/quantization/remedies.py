"""Two remedies for FP4 (arXiv 2501.17116): outliers kept apart, and a gradient through the rounding.

**Outlier clamping with compensation.** A few elements of an activation are much larger than the rest and
cost all others their resolution. x is clamped to its own quantiles 1 - a and a; the small part is quantized,
and what was cut off, a sparse tensor, is multiplied in high precision:

    x = clamp(x) + rest            x @ w  ~  Q(clamp(x)) @ Q(w) + rest @ Q(w)

**Differentiable gradient estimator.** The straight-through estimator says that rounding has slope 1
everywhere. On the interval of width d between two neighbours of the grid, rounding is instead approximated by

    f(t) = d/2 (1 + sign(u) |u|^(1/k)),   u = 2 t / d - 1      t from the lower neighbour

whose slope |u|^(1/k - 1) / k multiplies the weight's gradient. It is 1/k on the grid, rises to infinity half
way between two points, where rounding jumps, and is cut at a cap there.
"""

import torch

from narrowgauge.quantization import scales
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.cast import Cast


def clamp_outliers(x: torch.Tensor, quantile: float) -> torch.Tensor:
    """x clamped to its quantiles 1 - `quantile` and `quantile`, each an element of x, no mean of two."""
    n = x.numel()
    if n == 0:
        return x
    flat = x.detach().flatten().float()
    low = flat.kthvalue(int((1 - quantile) * n) + 1).values
    high = flat.kthvalue(min(int(quantile * n) + 1, n)).values
    return x.clamp(low.to(x.dtype), high.to(x.dtype))


def estimator_slope(w: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
    """The slope of rounding at each element of `w` under a cast, float32 of w's shape.

    Only for casts with fp32 scales: `estimator_k` and `estimator_cap` are the k and the cap of above.
    """
    blocks = blocks_of(w.shape, cast, axis)
    split = blocks.split(w.detach()).float()
    amax = split.abs()
    for dim in reversed(blocks.inner):
        amax = amax.amax(dim, keepdim=True)
    encode, _ = scales.fp32_scale(amax, cast.element, cast.power_of_two)
    t = (split * encode).abs().clamp(max=cast.element.max)
    exponent = torch.frexp(t.clamp(min=cast.element.smallest_normal)).exponent - 1
    d = torch.ldexp(torch.ones_like(t), exponent - cast.element.mantissa_bits)
    u = (2 * torch.remainder(t, d) / d - 1).abs()
    slope = (u ** (1 / cast.estimator_k - 1) / cast.estimator_k).clamp(max=cast.estimator_cap)
    return blocks.merge(slope)

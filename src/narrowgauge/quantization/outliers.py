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

from narrowgauge.formats.rounding import exponent_bits, inverse_quantum
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.scale_and_round import scales_of
from narrowgauge.quantization.sharding.shard import TensorShard


def clamp_outliers(x: torch.Tensor, quantile: float, part: TensorShard | None = None) -> torch.Tensor:
    """x clamped to its quantiles 1 - `quantile` and `quantile`, each an element of x, no mean of two.

    Of a `part` they are those of the global tensor, all of which is brought here to be ordered.
    """
    every = x.detach() if part is None else part.all_gather_flat(x.detach())
    n = every.numel()
    if n == 0:
        return x
    low, high = _ranked(every, int((1 - quantile) * n), min(int(quantile * n), n - 1))
    return x.clamp(low, high)


def _ranked(x: torch.Tensor, *ranks: int) -> list[torch.Tensor]:
    """The elements of x at places of its sorted order (0 the smallest, NaN last), 0-dim, in x's dtype."""
    flat = x.flatten()
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = torch.bincount(flat.view(torch.int16).int().bitwise_and_(0xFFFF), minlength=2**16)
        if not counts[0x7F81:0x8000].any() and not counts[0xFF81:].any():  # no NaN, which no order holds
            return [_from_counts(counts, rank) for rank in ranks]
    flat = flat.float()
    return [(flat.kthvalue(rank + 1).values + 0.0).to(x.dtype) for rank in ranks]  # -0 + 0 = +0


def _from_counts(counts: torch.Tensor, rank: int) -> torch.Tensor:
    """The bfloat16 at a place of the sorted order, from how often each of the 65,536 occurs.

    Much faster than a selection among millions: positive numbers are ordered as their bits are, negative ones
    the other way round.
    """
    negative, positive = counts[2**15 :].flip(0), counts[: 2**15]
    place = int(torch.searchsorted(torch.cat([negative, positive]).cumsum(0), rank, right=True))
    word = place - 2**15 if place >= 2**15 else -1 - place
    return torch.tensor(word, dtype=torch.int16).view(torch.bfloat16) + 0.0


def estimator_slope(w: torch.Tensor, cast: Cast, axis: int, part: TensorShard | None = None) -> torch.Tensor:
    """The slope of rounding at each element of `w` under a cast, float32 of w's shape.

    Only for casts with fp32 scales: `estimator_k` and `estimator_cap` are the k and the cap of above.
    """
    blocks = blocks_of(w.shape, cast, axis)
    split = blocks.split(w.detach())
    t = (
        (split.float() * scales_of(split, cast, blocks, None, part, axis).encode)
        .abs_()
        .clamp_(max=cast.element.max)
    )
    t.mul_(inverse_quantum(exponent_bits(t, cast.element), cast.element, t.dtype))  # in units of d, exact
    u = t.sub_(t.floor()).mul_(2).sub_(1).abs_()
    slope = u.pow_(1 / cast.estimator_k - 1).div_(cast.estimator_k).clamp_(max=cast.estimator_cap)
    return blocks.merge(slope)

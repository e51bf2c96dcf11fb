"""Critical values for comparing several means with one reference at once (Dunnett 1955).

Let k arms and a reference have n seeds each, and normal errors with one variance, estimated with d degrees of
freedom. The statistics T_a = (z_a - z_0) / (sqrt(2) u) share the reference z_0 and the estimate
u = sqrt(chi2_d / d), so

    P(all |T_a| <= c) = E_u E_z [Phi(z + sqrt(2) c u) - Phi(z - sqrt(2) c u)]^k

and the critical value c is the one for which this is 95 %. For k = 1 it is Student's quantile. Both
expectations are sums over Gauss nodes.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.t_interval import CONFIDENCE, t_quantile

FloatArray = NDArray[np.float64]
_SPREAD_NODES, _NORMAL_NODES = 64, 32
_erfc = np.vectorize(math.erfc, otypes=[float])


def normal_cdf(x: FloatArray) -> FloatArray:
    """Probability that a standard normal variable is at most `x`."""
    return 0.5 * np.asarray(_erfc(-x / math.sqrt(2)), dtype=np.float64)


@cache
def spread_nodes(degrees: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights of u = sqrt(chi2 / degrees), the ratio of an estimated deviation to the true one.

    >>> nodes, weights = spread_nodes(4)
    >>> round(float(weights.sum()), 6), round(float((weights * nodes**2).sum()), 6)
    (1.0, 1.0)
    """
    reach = 8 / math.sqrt(2 * degrees)
    low, high = max(0.0, 1 - reach), 1 + reach
    x, w = np.polynomial.legendre.leggauss(_SPREAD_NODES)
    u = low + (high - low) * (x + 1) / 2
    d = degrees
    log_density = (
        math.log(2) + d / 2 * math.log(d / 2) - math.lgamma(d / 2) + (d - 1) * np.log(u) - d * u**2 / 2
    )
    return u, w * (high - low) / 2 * np.exp(log_density)


@cache
def critical_value(arms: int, degrees: int, confidence: float = CONFIDENCE) -> float:
    """The c that the largest of `arms` statistics exceeds in 1 - `confidence` of all experiments.

    >>> round(critical_value(1, 4), 3), round(critical_value(3, 10), 2)
    (2.776, 2.76)
    """
    if arms == 1:
        return t_quantile(degrees, confidence)
    low, high = 0.0, 4.0
    while _share_within(high, arms, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, arms, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _share_within(c: float, arms: int, degrees: int) -> float:
    """Probability that no statistic exceeds `c`."""
    u, weights = spread_nodes(degrees)
    z, of_z = np.polynomial.hermite_e.hermegauss(_NORMAL_NODES)
    reach = math.sqrt(2) * c * u[:, None]
    within = (normal_cdf(z + reach) - normal_cdf(z - reach)) ** arms
    return float(weights @ within @ of_z) / math.sqrt(2 * math.pi)

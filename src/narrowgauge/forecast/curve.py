"""How the gap of a narrow forward pass depends on size and length: two curves (`Laws` takes both).

With N parameters and D tokens, n = ln(N / 10^8) and d = ln(D / 10^10):

**Power law.**    ln h = p (d - n)

The gap grows with tokens per parameter without end. It is what a first look at the points suggests: p is 0.15
to 0.2 for every scheme from 30 to 200 million parameters.

**Shares.** The loss has a part that more parameters would lower, A / N^a, and one that more tokens would
lower, B / D^b (Hoffmann et al. 2022). Let t be the second over the first. Noise in the forward pass acts like
fewer parameters, and, phi times as much, like fewer tokens; so its gap is the mean of both effects,
weighted by the shares of the two parts, times a power of the size:

    ln h = -q n + ln((1 + phi t) / (1 + t)),      t = exp(t0 + a n - b d)

Where data is short (t large) the gap is small and flat; where data is plenty (t small) it approaches a
ceiling that no more tokens raise. In between it grows like a power. Quartet's law (arXiv 2505.14669) is of
this kind, with efficiencies of parameters and tokens.

Both are zero at n = d = 0, so that kappa is the gap at 100 million parameters and 10 billion tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowgauge.forecast.setting import UNIT_PARAMS, UNIT_TOKENS

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Power:
    """The power law of tokens per parameter."""

    name: str = "power"

    @property
    def priors(self) -> Mapping[str, tuple[float, float]]:
        """The exponent p: published schemes have 0.07 to 0.25, each by itself."""
        return {"p": (0.15, 0.1)}

    def __call__(self, values: Array, n: Array, d: Array) -> tuple[Array, Array]:
        """ln h and its derivative."""
        return values[0] * (d - n), (d - n)[:, None]

    def exponent(self, values: Array, n: float, d: float) -> tuple[float, Array]:
        """The exponent p everywhere."""
        return float(values[0]), np.ones(1)


@dataclass(frozen=True)
class Shares:
    """The mean of an effect on capacity and one on data, weighted by their shares of the loss."""

    name: str = "shares"

    @property
    def priors(self) -> Mapping[str, tuple[float, float]]:
        """t0, a, b, q and ln phi.

        Published laws of the loss have a and b of 0.28 to 0.58 (arXiv 2203.15556, 2505.14302, 2505.14669),
        and of the gap in nats a power of N of 0.16 to 0.22 (the last two), of which the loss itself falls
        by a half.
        """
        return {
            "t0": (-1.0, 1.0),
            "a": (0.4, 0.15),
            "b": (0.5, 0.15),
            "q": (0.1, 0.05),
            "ln phi": (-1.5, 1.0),
        }

    def __call__(self, values: Array, n: Array, d: Array) -> tuple[Array, Array]:
        """ln h and its derivatives."""
        zero = np.zeros(1)
        log, slopes = self._raw(values, n, d)
        log_zero, slopes_zero = self._raw(values, zero, zero)
        return log - log_zero, slopes - slopes_zero

    def exponent(self, values: Array, n: float, d: float) -> tuple[float, Array]:
        """d ln h / d ln D, with derivatives by differences."""

        def at(v: Array) -> float:
            t0, a, b, _, log_phi = v
            log_t = float(np.clip(t0 + a * n - b * d, -60, 60))
            return float(-b * (_logistic(log_phi + log_t) - _logistic(log_t)))

        step = 1e-5
        value = at(values)
        return value, np.array([(at(values + step * unit) - value) / step for unit in np.eye(len(values))])

    @staticmethod
    def _raw(values: Array, n: Array, d: Array) -> tuple[Array, Array]:
        t0, a, b, q, log_phi = values
        log_t = np.clip(t0 + a * n - b * d, -60, 60)
        of_data, of_both = _logistic(log_phi + log_t), _logistic(log_t)
        log = -q * n + np.logaddexp(0, log_phi + log_t) - np.logaddexp(0, log_t)
        slope = of_data - of_both
        return log, np.stack([slope, slope * n, -slope * d, -n, of_data], axis=1)


def _logistic(x: float | Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.asarray(x, dtype=np.float64))))


Curve = Power | Shares
CURVES: tuple[Curve, ...] = (Power(), Shares())


def log_size(params: float) -> float:
    """N: ln(N / 10^8)."""
    return math.log(params / UNIT_PARAMS)


def log_tokens(tokens: float) -> float:
    """D: ln(D / 10^10)."""
    return math.log(tokens / UNIT_TOKENS)

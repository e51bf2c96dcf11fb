"""The law of the gap: how much loss a recipe costs at a size and a length.

**One GEMM.** N parameters see D tokens. A GEMM g of a recipe (fprop, dgrad or wgrad) whose operands have
the casts c adds, in percent of the loss of the bf16 run,

    term_g = kappa_g(c) h(N, D)                 for fprop: h is a curve (`curve`)
    term_g = kappa_g(c) (r / 100)^p_backward    for dgrad and wgrad: r = D / N tokens per parameter

**One recipe.** Its gap is the sum of its GEMMs, times what all of them share:

    gap = (term_fprop f + term_dgrad + term_wgrad) (1 - tail)^tau exp(recipe + family + reference + size(N))

    tail        the share of the blocks that stays wide
    f           1, or exp(finish) where the forward pass becomes wide once the learning rate falls
    recipe      what the parts of a recipe do together beyond their sum
    family      what a laboratory, its architecture and its corpus have in common
    reference   what all gaps to one bf16 run have in common
    size        a random walk over ln N from 100 million parameters outwards. It lets gaps of sizes that were
                seen leave the curve, and makes those beyond less certain by each decade

**One part.** A cast that no run has tried resembles those that quantize as finely. With e the noise of the
operands of a GEMM (`noise`), and delta what is particular to the casts,

    ln kappa_g(c) = alpha_side + eta ln(e / 0.02) + delta_c
                    side: forward, or backward for dgrad and wgrad

**Everything is Gaussian in the logarithm.** Each coefficient has a normal prior; each group of effects
(deltas of a side, recipes, families, references, steps of the walk) has one variance, which the points
decide. `fit` finds coefficients and variances.

A forecast is the median sum_g term_g, a deviation of structure in the logarithm, sqrt(J V J') / gap with J
the derivatives of the gap and V the covariance of the coefficients, and the noise of one pair of runs. An
effect that no point has informed keeps the variance of its group: a new recipe, family or size is less
certain than a known one, by as much as such effects turned out to matter.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from narrowgauge.forecast.curve import Curve, log_size, log_tokens
from narrowgauge.forecast.setting import BACKWARD, FORWARD, UNIT_PARAMS, Observed, Part, Setting

Array = NDArray[np.float64]
Column = tuple[Hashable, ...]

UNIT_NOISE = 0.02
KNOT = math.log(10) / 2  # of the walk, in ln N
TAILS = 5  # degrees of freedom of Student's distribution of the residuals, and so of forecasts
Z90 = 2.0150483733330233  # within which 90 % of it lie

#: Mean and deviation of the coefficients that stand alone, besides the curve's.
COEFFICIENTS: Mapping[Column, tuple[float, float]] = {
    ("exponent",): (0.0, 0.5),  # p_backward
    ("alpha", FORWARD): (math.log(2.0), 2.0),
    ("alpha", BACKWARD): (math.log(0.2), 2.0),
    ("eta",): (0.8, 0.3),
    ("tail",): (1.0, 0.5),  # tau; 1: wide blocks cost nothing, and the others what they cost without them
    ("finish",): (-1.2, 0.5),  # arXiv 2509.25149: about 1.5 % of the loss becomes 0.5 %
}
#: Deviation of each group of effects before the points are seen, and its degrees of freedom.
GROUPS: Mapping[str, tuple[float, float]] = {
    FORWARD: (0.2, 4.0),
    BACKWARD: (0.5, 4.0),
    "recipe": (0.1, 4.0),
    "family": (0.35, 4.0),
    "reference": (0.03, 4.0),
    "size": (0.1, 4.0),
}
NOISE_POWER = 0.25  # pairs of larger models deviate less, as N^-0.25


@dataclass(frozen=True, slots=True)
class Predicted:
    """The forecast of one setting."""

    gap: float  # the median of the gap in percent
    structure: float  # its deviation in the logarithm, without the noise of runs
    noise: float  # the deviation in percent of one pair of runs about it

    def interval(self, seeds: float = 1.0, z: float = Z90) -> tuple[float, float]:
        """The ends of the interval of a gap that is measured with some seeds; of the gap itself for `inf`."""
        noise = z * self.noise / math.sqrt(seeds)
        low = self.gap - math.hypot(self.gap * -math.expm1(-z * self.structure), noise)
        return low, self.gap + math.hypot(self.gap * math.expm1(z * self.structure), noise)

    def probability_above(self, gap: float, noise: float) -> float:
        """The probability of a measured gap of at least `gap`, whose own deviation is `noise`, in percent."""
        noise = max(noise, 1e-9)
        ratio = max(gap, 1e-3 * self.gap) / max(self.gap, 1e-9)
        away, z = abs(ratio - 1), abs(math.log(max(ratio, 1e-9))) / max(self.structure, 1e-9)
        structure = self.gap * (away / z if z > 1e-6 else self.structure)  # in percent, on this side
        distance = (gap - self.gap) / math.hypot(structure, noise)
        tail = _tail(abs(distance))
        return tail if distance >= 0 else 1 - tail


@dataclass(frozen=True)
class Law:
    """The fitted law."""

    curve: Curve  # the curve of the forward pass
    columns: Mapping[Column, int]  # the number of each coefficient in `theta`
    theta: Array  # the coefficients
    covariance: Array  # their covariance
    deviations: Mapping[str, float]  # the deviation of each group of effects
    noise: Mapping[str, float]  # the deviation in percent of a pair at 100 million parameters, by family
    typical: float  # that of a family without points, at any size
    scatter: float  # the deviation of a point about the law, as a share of its gap
    # the logarithm of the probability of the points, up to a constant, for the choice of a curve
    evidence: float
    observed: Sequence[Observed] = field(default=(), repr=False)  # the points that it was fitted to

    def predict(self, setting: Setting) -> Predicted:
        """The forecast of a setting; a gap of 0 for a recipe without a narrow GEMM."""
        noise = self._noise_of(setting)
        if not setting.parts:
            return Predicted(0.0, 0.0, noise)
        terms, slopes, fresh = self._terms(setting)
        gap = float(terms.sum())
        jacobian = terms @ slopes
        variance = float(jacobian @ self.covariance @ jacobian)
        for column in {column for row in fresh for column in row}:
            effect = sum(term * row.get(column, 0.0) for term, row in zip(terms, fresh, strict=True))
            variance += (float(effect) * self._deviation(column)) ** 2
        return Predicted(gap, math.sqrt(variance / gap**2 + self.scatter**2), noise)

    def terms(self, setting: Setting) -> Array:
        """The gap in percent of each GEMM of a setting."""
        return self._terms(setting)[0]

    def shift(self, part: Part, recipe: str) -> tuple[float, float]:
        """ln kappa of a part beyond what the noise of its casts makes it, and its deviation."""
        effects = effects_of(part, recipe)
        known = [self.columns[c] for c in effects if c in self.columns]
        variance = float(self.covariance[np.ix_(known, known)].sum())
        variance += sum(self._deviation(c) ** 2 for c in effects if c not in self.columns)
        return float(self.theta[known].sum()), math.sqrt(variance)

    def coefficient(self, *column: Hashable) -> tuple[float, float]:
        """One coefficient and its deviation."""
        k = self.columns[column]
        return float(self.theta[k]), math.sqrt(float(self.covariance[k, k]))

    def exponent(self, settings: Sequence[Setting]) -> tuple[float, float]:
        """The mean of d ln gap / d ln D over some settings, and its deviation."""
        gradient, mean = np.zeros(len(self.theta)), 0.0
        of_curve = [self.columns["curve", name] for name in self.curve.priors]
        p_backward = self.columns["exponent",]
        for setting in settings:
            terms, _, _ = self._terms(setting)
            of_forward, slopes = self.curve.exponent(
                self.theta[of_curve], log_size(setting.params), log_tokens(setting.tokens)
            )
            for part, share in zip(setting.parts, terms / terms.sum(), strict=True):
                if part.side == FORWARD:
                    mean += share * of_forward
                    gradient[of_curve] += share * slopes
                else:
                    mean += share * float(self.theta[p_backward])
                    gradient[p_backward] += share
        count = max(1, len(settings))
        gradient /= count
        return mean / count, math.sqrt(float(gradient @ self.covariance @ gradient))

    def _terms(self, setting: Setting) -> tuple[Array, Array, list[dict[Column, float]]]:
        """Each term, the derivatives of its logarithm, and those by effects that the law does not have."""
        rows = [row_of(setting, part) for part in setting.parts]
        design = matrix([{c: x for c, x in row.items() if c in self.columns} for row in rows], self.columns)
        fresh = [{c: x for c, x in row.items() if c not in self.columns} for row in rows]
        logs = design @ self.theta
        logs += [sum(prior_of(c)[0] * x for c, x in row.items()) for row in fresh]
        of_curve = [self.columns["curve", name] for name in self.curve.priors]
        here = np.array([log_size(setting.params)]), np.array([log_tokens(setting.tokens)])
        log_h, slopes = self.curve(self.theta[of_curve], *here)
        for number, part in enumerate(setting.parts):
            if part.side == FORWARD:
                logs[number] += log_h[0]
                design[number, of_curve] = slopes[0]
        return np.exp(logs), design, fresh

    def _deviation(self, column: Column) -> float:
        return self.deviations.get(str(column[0]), 1.0) * prior_of(column)[1]

    def _noise_of(self, setting: Setting) -> float:
        own = self.noise.get(setting.family)
        return self.typical if own is None else own * noise_of_size(setting.params)


def _tail(t: float) -> float:
    """The probability of more than `t` (Abramowitz and Stegun 26.7.3, for the five degrees of `TAILS`)."""
    theta = math.atan(t / math.sqrt(TAILS))
    terms = math.cos(theta) + math.cos(theta) * (2 / 3 * math.cos(theta) ** 2)
    return 0.5 * (1 - 2 / math.pi * (theta + math.sin(theta) * terms))


def row_of(setting: Setting, part: Part) -> dict[Column, float]:
    """The coefficients of the logarithm of one term, without the curve's, and their factors."""
    row: dict[Column, float] = {("alpha", part.side): 1.0, **effects_of(part, setting.recipe)}
    if part.noise is not None:
        row["eta",] = math.log(part.noise / UNIT_NOISE)
    if part.side == BACKWARD:
        row["exponent",] = math.log(setting.tokens_per_param / 100)
    row["family", setting.family] = 1.0
    row["reference", setting.family, setting.params, setting.tokens] = 1.0
    if setting.tail:
        row["tail",] = math.log1p(-min(setting.tail, 0.99))
    if setting.finishes and part.side == FORWARD:
        row["finish",] = 1.0
    return row | _walk(setting.params)


def effects_of(part: Part, recipe: str) -> dict[Column, float]:
    """The effects that are particular to a part: of its casts, and of its recipe."""
    return {(part.side, part.gemm, part.casts): 1.0, ("recipe", recipe): 1.0}


def _walk(params: float) -> dict[Column, float]:
    """The steps of the walk from 100 million parameters to a size; the last counts by the part that is taken.

    >>> [(column, round(x, 2)) for column, x in _walk(1e9).items()]
    [(('size', 1), 1.0), (('size', 2), 1.0)]
    """
    distance = log_size(params) / KNOT
    sign = 1 if distance >= 0 else -1
    whole = int(abs(distance) + 1e-9)
    row: dict[Column, float] = {("size", sign * k): 1.0 for k in range(1, whole + 1)}
    if abs(distance) - whole > 1e-9:
        row["size", sign * (whole + 1)] = abs(distance) - whole
    return row


def prior_of(column: Column) -> tuple[float, float]:
    """The prior mean of a coefficient, and its deviation; in units of its group's, for an effect."""
    return COEFFICIENTS.get(column, (0.0, 1.0))


def noise_of_size(params: float) -> float:
    """The deviation of a pair of runs, relative to 100 million parameters."""
    return float((params / UNIT_PARAMS) ** -NOISE_POWER)


def matrix(rows: Sequence[Mapping[Column, float]], columns: Mapping[Column, int]) -> Array:
    """The factors of all coefficients in each row."""
    found = np.zeros((len(rows), len(columns)))
    for number, row in enumerate(rows):
        for column, x in row.items():
            found[number, columns[column]] = x
    return found

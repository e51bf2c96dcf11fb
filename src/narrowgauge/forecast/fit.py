"""Fits the law to points: coefficients by Fisher's scoring, variances by their marginal probability.

With theta all coefficients, T_ig the term of GEMM g at point i and G_ig the derivatives of its logarithm,

    gap_i = sum_g T_ig + e_i,      var e_i = v_i = sigma_i^2 / seeds_i + (rho gap_i)^2
    J_i   = sum_g T_ig G_ig
    w_i   = (nu + 1) / (nu + (gap_i - f_i)^2 / v_i)       f_i = sum_g T_ig; e_i is Student's t with nu degrees
    P     = S^-1 + c J' diag(1 / v) J,    c = (nu + 1) / (nu + 3), S the prior covariance
    theta <- theta + P^-1 (S^-1 (m - theta) + J' diag(w / v) (gap - f))

sigma_i = sigma_family (N / 10^8)^-1/4 is the noise of a pair of runs that differ only in their luck,
unless the source of a point states its own error; rho is how far points lie off the law. c / v_i is what a
point of Student's distribution shows of its mean (Lange, Little and Taylor 1989): less than its weights add
up to, which would make intervals an eighth too narrow. V = P^-1 is the covariance of theta.

Each step also moves each variance s^2 towards the maximum of the probability of the points, whose
logarithm is, by Laplace's approximation,

    ln P = -1/2 [ sum_i (nu + 1) ln(1 + (gap_i - f_i)^2 / (nu v_i)) + ln v_i
                  + (theta - m)' S^-1 (theta - m) + ln|S| + ln|P| ]

times a prior: d degrees of freedom at s_0, so that a group of one member still has a spread. Where its
derivative by ln s^2 is zero (MacKay 1992),

    s^2 (d + sum_k a_k left_k) = d s_0^2 + s^2 sum_k a_k q_k

    of a group of effects: a_k = 1, q_k = (theta_k - m_k)^2 / s^2, left_k = 1 - V_kk / s^2
    of sigma and rho:      a_i their share of v_i, q_i = w_i (gap_i - f_i)^2 / v_i,
                           left_i = 1 - c J_i V J_i' / v_i

The steps end when neither a coefficient nor the logarithm of a deviation moves. ln P also compares curves.

**Both curves are one law** (`Laws`): the mean of their forecasts, whose disagreement is uncertainty.
Between 30 and 200 million parameters the points prefer the curve of shares by far; of larger sizes, left
out one at a time, the power law forecasts as well or better (docs/forecast.md). Neither evidence decides
what happens beyond the points, so both count for a half:

    ln gap = mean of ln gap_c              c: the curves
    variance = mean of variance_c + variance of ln gap_c over the curves

Where they agree, as at 20 to 200 tokens per parameter, this changes nothing; where they part, the interval
is as wide as both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.forecast.curve import CURVES, Curve, log_size, log_tokens
from narrowgauge.forecast.law import (
    COEFFICIENTS,
    GROUPS,
    TAILS,
    Array,
    Column,
    Law,
    Predicted,
    effects_of,
    matrix,
    noise_of_size,
    prior_of,
    row_of,
)
from narrowgauge.forecast.setting import NEW, UNIT_PARAMS, UNIT_TOKENS, Hint, Observed, Part, Setting
from narrowgauge.recipes import GEMMS

NOISE_PRIOR = (0.1, 3.0)  # deviation of a pair at 100 million parameters in percent, degrees of freedom
SCATTER_PRIOR = (0.03, 4.0)  # of a point about the law, as a share of its gap
_INFORMATION = (TAILS + 1) / (TAILS + 3)  # of one point on its mean, over that of a Gaussian
_ROUNDS, _ENOUGH = 200, 2e-3


def fit_law(observed: Sequence[Observed], hints: Sequence[Hint] = (), curve: Curve = CURVES[0]) -> Law:
    """Fit the law with one curve to measured gaps.

    Args:
        observed: The points; those without a narrow GEMM are left out.
        hints: What is known of parts in addition to the points.
        curve: The curve of the forward pass.
    """
    return _Fit([one for one in observed if one.setting.parts], hints, curve).law()


class _Fit:
    """The state of the iteration for one curve: coefficients, their covariance, and the variances."""

    def __init__(self, observed: Sequence[Observed], hints: Sequence[Hint], curve: Curve) -> None:
        self.observed, self.curve = observed, curve
        rows = [
            [row_of(one.setting, part) if part else {} for part in _by_gemm(one.setting)] for one in observed
        ]
        hint_rows = [effects_of(hint.part, hint.recipe) for hint in hints]
        priors: dict[Column, tuple[float, float]] = dict(COEFFICIENTS)
        priors |= {("curve", name): prior for name, prior in curve.priors.items()}
        self.columns: dict[Column, int] = {column: k for k, column in enumerate(priors)}
        for row in (*(row for of_point in rows for row in of_point), *hint_rows):
            for column in row:
                self.columns.setdefault(column, len(self.columns))
        shape = len(GEMMS), len(observed), len(self.columns)
        self.slopes = np.zeros(shape)  # of the logarithm of each term; a GEMM without a term has none
        for gemm in range(len(GEMMS)):
            self.slopes[gemm] = matrix([of_point[gemm] for of_point in rows], self.columns)
        self.is_term = np.array(
            [[bool(of_point[g]) for of_point in rows] for g in range(len(GEMMS))]
        ).reshape(shape[:2])
        self.hint_design = matrix(hint_rows, self.columns)
        self.hint_values = np.array([hint.shift for hint in hints])
        self.hint_weights = np.array([hint.deviation**-2.0 for hint in hints])
        self.n = np.array([log_size(one.setting.params) for one in observed])
        self.d = np.array([log_tokens(one.setting.tokens) for one in observed])
        self._read_noise()
        self._read_priors(priors)

    def _read_noise(self) -> None:
        self.gaps = np.array([one.gap for one in self.observed])
        self.seeds = np.array([float(one.seeds) for one in self.observed])
        self.of_size = np.array([noise_of_size(one.setting.params) for one in self.observed])
        self.stated = np.array([one.error or 0.0 for one in self.observed])
        families = [one.setting.family for one in self.observed]
        self.names = sorted(set(families)) or [NEW]
        self.family = np.array([self.names.index(name) for name in families], dtype=np.int64)
        self.noise = np.full(len(self.names), NOISE_PRIOR[0])
        self.scatter = SCATTER_PRIOR[0]

    def _read_priors(self, priors: Mapping[Column, tuple[float, float]]) -> None:
        found = [priors.get(column) or prior_of(column) for column in self.columns]
        self.means = np.array([mean for mean, _ in found])
        self.scales = np.array([scale for _, scale in found])
        self.groups = {
            name: np.array([k for column, k in self.columns.items() if column[0] == name], dtype=np.int64)
            for name in GROUPS
        }
        self.of_curve = [self.columns["curve", name] for name in self.curve.priors]
        self.deviations = {name: deviation for name, (deviation, _) in GROUPS.items()}
        self.theta = self.means.copy()
        self._here = self._at()

    def law(self) -> Law:
        """Iterate to the end; the law."""
        for _ in range(_ROUNDS):
            if max(self._step(), self._update_variances()) < _ENOUGH:
                break
        return Law(
            curve=self.curve,
            columns=self.columns,
            theta=self.theta,
            covariance=self.covariance,
            deviations=self.deviations,
            noise=dict(zip(self.names, map(float, self.noise), strict=True)),
            typical=self._typical_noise(),
            scatter=self.scatter,
            evidence=self._evidence(),
            observed=self.observed,
        )

    def _typical_noise(self) -> float:
        """The mean deviation of a pair over families, each at its sizes, of those that state no errors."""
        logs, free = np.log(self.noise[self.family] * self.of_size), self.stated == 0
        means = [logs[o].mean() for f in range(len(self.names)) if (o := (self.family == f) & free).any()]
        return math.exp(float(np.mean(means))) if means else NOISE_PRIOR[0]

    def _step(self) -> float:
        """One step of Fisher's scoring; returns the largest change of a coefficient."""
        gaps, jacobian = self._here
        _, total = self._variances(gaps)
        residual = self.gaps - gaps
        prior = 1 / self._prior_variance()
        self.precision = np.diag(prior) + jacobian.T @ (jacobian * (_INFORMATION / total)[:, None])
        slope = prior * (self.means - self.theta)
        slope += jacobian.T @ (self._weights(residual**2, total) * residual / total)
        if len(self.hint_values):
            self.precision += (self.hint_design.T * self.hint_weights) @ self.hint_design
            away = self.hint_values - self.hint_design @ self.theta
            slope += self.hint_design.T @ (self.hint_weights * away)
        self.covariance = np.asarray(np.linalg.inv(self.precision), dtype=np.float64)
        change = self.covariance @ slope
        change *= min(1.0, 0.5 / max(1e-12, float(np.abs(change).max())))  # far from the end, small steps
        self.theta = self.theta + change
        self._here = self._at()
        return float(np.abs(change).max())

    def _at(self) -> tuple[Array, Array]:
        """The gap of each point, and its derivatives."""
        values = self.theta[self.of_curve]
        log_h, by_curve = self.curve(values, self.n, self.d)
        self.slopes[0][:, self.of_curve] = 0.0
        logs = self.slopes @ self.theta
        logs[0] += log_h
        self.slopes[0][:, self.of_curve] = by_curve
        terms = np.where(self.is_term, np.exp(np.clip(logs, -30, 8)), 0.0)
        return terms.sum(axis=0), np.einsum("gp,gpk->pk", terms, self.slopes)

    def _variances(self, gaps: Array) -> tuple[Array, Array]:
        """The variance of the noise of each point, and of all by which it may leave the law."""
        own = self.noise[self.family] * self.of_size / np.sqrt(self.seeds)
        additive = np.where(self.stated > 0, self.stated, own) ** 2
        return additive, additive + (self.scatter * gaps) ** 2

    @staticmethod
    def _weights(square: Array, total: Array) -> Array:
        """How much each point counts: less, if it lies farther off than its variance explains."""
        return np.asarray((TAILS + 1) / (TAILS + square / total))

    def _update_variances(self) -> float:
        """One step of each variance to the most probable one; returns the largest change of a logarithm."""
        before = np.log([self.scatter, *self.noise, *self.deviations.values()])
        gaps, jacobian = self._here
        additive, total = self._variances(gaps)
        square = (self.gaps - gaps) ** 2
        square *= self._weights(square, total) / total
        left = 1 - _INFORMATION * ((jacobian @ self.covariance) * jacobian).sum(axis=1) / total
        of_noise = additive / total
        self.scatter = _next(self.scatter, SCATTER_PRIOR, 1 - of_noise, square, left)
        for number in range(len(self.names)):
            own = of_noise * (self.family == number) * ~(self.stated > 0)
            self.noise[number] = _next(self.noise[number], NOISE_PRIOR, own, square, left)
        effects, known = (self.theta - self.means) ** 2, np.diag(self.covariance)
        for name, members in self.groups.items():
            variance, ones = self.deviations[name] ** 2, np.ones(len(members))
            ratio, free = effects[members] / variance, 1 - known[members] / variance
            self.deviations[name] = _next(self.deviations[name], GROUPS[name], ones, ratio, free)
        after = np.log([self.scatter, *self.noise, *self.deviations.values()])
        return float(np.abs(after - before).max())

    def _prior_variance(self) -> Array:
        variance = self.scales**2
        for name, members in self.groups.items():
            variance[members] = self.deviations[name] ** 2
        return np.asarray(variance)

    def _evidence(self) -> float:
        if not len(self.gaps):
            return 0.0
        gaps, _ = self._here
        _, total = self._variances(gaps)
        variance = self._prior_variance()
        square = (self.gaps - gaps) ** 2 / total
        chi = float(((TAILS + 1) * np.log1p(square / TAILS)).sum() + np.log(total).sum())
        prior = float(((self.theta - self.means) ** 2 / variance).sum() + np.log(variance).sum())
        return -0.5 * (chi + prior + float(np.linalg.slogdet(self.precision)[1]))


def _by_gemm(setting: Setting) -> list[Part | None]:
    """The part of each GEMM of a setting; None for one that is wide."""
    parts = {part.gemm: part for part in setting.parts}
    return [parts.get(gemm) for gemm in GEMMS]


def _next(deviation: float, prior: tuple[float, float], shares: Array, square: Array, left: Array) -> float:
    """A deviation after one step: the squares of its share, over the degrees of freedom that they have left.

    Args:
        deviation: The deviation.
        prior: Its prior, and the degrees of freedom of that.
        shares: The share of the deviation's variance in that of each square.
        square: Squares, over their variance.
        left: What the coefficients leave of the degree of freedom of each.
    """
    first, degrees = prior
    found = degrees * first**2 + deviation**2 * float(shares @ square)
    found /= degrees + max(0.0, float(shares @ left))
    return min(max(math.sqrt(found), deviation / 2), 2 * deviation)


@dataclass(frozen=True, slots=True)
class Laws:
    """The fitted laws, one for each curve, the power law first."""

    each: tuple[Law, ...]

    @property
    def observed(self) -> Sequence[Observed]:
        """The points that they were fitted to."""
        return self.each[0].observed

    def predict(self, setting: Setting) -> Predicted:
        """The forecast of a setting."""
        found = [law.predict(setting) for law in self.each]
        if not setting.parts:
            return found[0]
        logs = np.log([one.gap for one in found])
        variance = float(np.mean([one.structure**2 for one in found]) + logs.var())
        noise = float(np.mean([one.noise for one in found]))
        return Predicted(math.exp(float(logs.mean())), math.sqrt(variance), noise)

    def kappa(self, setting: Setting) -> Predicted:
        """The gap of a setting's recipe at 100 million parameters and 10 billion tokens."""
        return self.predict(setting.at(UNIT_PARAMS, UNIT_TOKENS))

    def terms(self, setting: Setting) -> Array:
        """The gap in percent of each GEMM of a setting; they add up to that of `predict`."""
        terms = np.exp(np.mean([np.log(law.terms(setting)) for law in self.each], axis=0))
        return np.asarray(terms * (self.predict(setting).gap / terms.sum()))

    def shift(self, part: Part, recipe: str) -> tuple[float, float]:
        """ln kappa of a part beyond what the noise of its casts makes it, and its deviation."""
        mean, deviation = np.mean([law.shift(part, recipe) for law in self.each], axis=0)
        return float(mean), float(deviation)


def fit_laws(observed: Sequence[Observed], hints: Sequence[Hint] = ()) -> Laws:
    """Fit the law with each curve."""
    return Laws(tuple(fit_law(observed, hints, curve) for curve in CURVES))

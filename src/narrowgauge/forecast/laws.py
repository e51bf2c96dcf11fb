"""Both curves as one law: the mean of their forecasts; their disagreement is uncertainty.

Between 30 and 200 million parameters the points prefer the curve of shares by far; of larger sizes, left
out one at a time, the power law forecasts as well or better (docs/forecast.md). Neither evidence decides
what happens beyond the points, so both count for a half:

    ln gap = mean of ln gap_c              c: the curves
    variance = mean of variance_c + variance of ln gap_c over the curves

Where they agree, as at 20 to 200 tokens per parameter, this changes nothing; where they part, the interval
is as wide as both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.forecast.curve import CURVES
from narrowgauge.forecast.fit import fit_law
from narrowgauge.forecast.law import Array, Law, Predicted
from narrowgauge.forecast.setting import UNIT_PARAMS, UNIT_TOKENS, Hint, Observed, Part, Setting


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

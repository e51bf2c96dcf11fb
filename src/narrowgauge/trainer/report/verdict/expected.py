"""Does the format explain a measured gap? Compares the gap of a comparison with its forecast.

The forecast is a distribution of the gap of a pair of runs in a family without points; the measurement has a
deviation as well. The word follows from the probability of a measured gap at least as large as this one:

    worse     below 5 %: the format does not explain it; look for a fault
    better    above 95 %: look whether the recipe ran at all
    inside    else

A comparison is judged by the published points alone, never by its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from narrowgauge.forecast import OWN, Forecast, Forecaster, Observed, described
from narrowgauge.recipes import Recipe, parse_recipe, recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.verdict import Verdict, known_of, size_of, verdicts

_RARE = 0.05


@dataclass(frozen=True, slots=True)
class Expectation:
    """A measured gap and its forecast."""

    name: str  # the variant
    gap: float  # the measured gap in percent
    forecast: Forecast
    probability: float | None  # of a measured gap at least as large; None where the forecast is refused

    @property
    def word(self) -> str:
        """ "inside", "worse", "better" or "not forecast"."""
        if self.probability is None:
            return "not forecast"
        if self.probability < _RARE:
            return "worse"
        return "better" if self.probability > 1 - _RARE else "inside"

    @property
    def short(self) -> str:
        """The word as a clause."""
        return {
            "inside": "inside what the format explains",
            "worse": "worse than the format explains: look for a fault",
            "better": "better than the format explains: look whether the recipe ran",
            "not forecast": "no forecast to compare it with",
        }[self.word]

    @property
    def text(self) -> str:
        """The sentence for people."""
        if self.probability is None or self.forecast.gap_percent is None:
            return f"expected: {self.name} is not forecast: {self.forecast.refused}"
        of = self.forecast.gap_percent
        return (
            f"expected: {self.name} {self.gap:+.2f} %, forecast {of.mean:+.2f} % ({of.low:+.2f} to "
            f"{of.high:+.2f}): {self.short}; a gap of this size or more has a probability of "
            f"{self.probability:.0%}"
        )


def expectations(runs: Sequence[Run]) -> list[Expectation]:
    """The expectation of each variant whose recipe, size and length are known."""
    forecaster, results = Forecaster(), []
    for one, own, size in _known(runs):
        forecast = forecaster.forecast(own, size, one.tokens, own.name)
        predicted, mean = forecast.predicted, one.individual.mean
        if math.isfinite(mean):
            probability = None if predicted is None else predicted.probability_above(mean, _deviation(one))
            results.append(Expectation(one.name, mean, forecast, probability))
    return results


def own_points(runs: Sequence[Run]) -> tuple[list[Observed], dict[str, Recipe]]:
    """The gaps of runs as points of a separate family, and their recipes by name.

    Runs that were compared with one reference are one list: the first run's variant is the reference.
    """
    points, recipes = [], {}
    for one, own, size in _known(runs):
        if values := [gap for gap in one.gaps.values() if math.isfinite(gap)]:
            setting = described(own).setting(own.name, size, one.tokens, family=OWN)
            points.append(Observed(setting, sum(values) / len(values), len(values), _deviation(one)))
            recipes[own.name] = own
    return points, recipes


def _known(runs: Sequence[Run]) -> Iterator[tuple[Verdict, Recipe, int]]:
    """The variants with gaps whose recipe and size are known, with both; no controls."""
    for one in verdicts(runs):
        run = next(iter(one.runs.values()))
        if one.gaps and not one.is_control and (own := recipe_of(run)) is not None and (size := size_of(run)):
            yield one, own, size


def recipe_of(run: Run) -> Recipe | None:
    """The recipe of a run: its own text, else the shipped one of its name; None if it is unknown."""
    try:
        return parse_recipe(run.recipe_text, "recipe.toml") if run.recipe_text else recipe(run.recipe)
    except UserError:
        return None


def _deviation(one: Verdict) -> float:
    """The deviation in percent of a mean gap: as measured, else as runs of such a length usually have."""
    spread = None if one.judgement is None else one.judgement.spread
    deviation = (known_of(list(one.runs.values())) or 0.5) if spread is None else spread.deviation
    return deviation / math.sqrt(len(one.gaps))

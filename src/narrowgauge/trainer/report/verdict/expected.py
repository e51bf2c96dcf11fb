"""Does the format explain a measured gap? Compares the gap of a comparison with its forecast.

The forecast is a distribution of the gap of a pair of runs in a family without points; the measurement has a
deviation as well. The word follows from the probability of a measured gap at least as large as this one:

    worse     below 5 %: the format does not explain it; look for a fault
    better    above 95 %: look whether the recipe ran at all
    inside    else

A comparison is judged by the published points alone, never by its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.forecast import OWN, Forecast, Forecaster, Observed, described
from narrowgauge.recipes import Recipe, parse_recipe, recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.groups import Group, groups
from narrowgauge.trainer.report.verdict.rule import Judgement
from narrowgauge.trainer.report.verdict.verdict import gaps_of, judged, known_of, size_of

_RARE = 0.05


@dataclass(frozen=True, slots=True)
class Expectation:
    """A measured gap and its forecast.

    Attributes:
        name: The variant.
        gap: The measured gap in percent.
        forecast: The forecast.
        probability: Of a measured gap at least as large; None where the forecast is refused.
    """

    name: str
    gap: float
    forecast: Forecast
    probability: float | None

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
        interval = self.forecast.gap_percent
        return (
            f"expected: {self.name} {self.gap:+.2f} %, forecast {interval.mean:+.2f} % "
            f"({interval.low:+.2f} to "
            f"{interval.high:+.2f}): {self.short}; a gap of this size or more has a probability of "
            f"{self.probability:.0%}"
        )


def expectations(runs: Sequence[Run]) -> list[Expectation]:
    """The expectation of each variant whose recipe, size and length are known."""
    all_groups = groups(runs)
    gaps, found = judged(all_groups)
    forecaster = Forecaster()
    results = []
    for number, group in enumerate(all_groups):
        run = next(iter(group.runs.values()))
        of_run, size = recipe_of(run), size_of(run)
        if not number or group.is_control or not gaps[number] or of_run is None or not size:
            continue
        tokens = _tokens(group, all_groups[0])
        forecast = forecaster.forecast(of_run, size, tokens, of_run.name)
        mean = sum(gaps[number].values()) / len(gaps[number])
        if not math.isfinite(mean):
            continue
        deviation = _deviation(found.get(number), run, len(gaps[number]))
        predicted = forecast.predicted
        probability = None if predicted is None else predicted.probability_above(mean, deviation)
        results.append(Expectation(group.name, mean, forecast, probability))
    return results


def own_points(runs: Sequence[Run]) -> tuple[list[Observed], dict[str, Recipe]]:
    """The gaps of runs as points of a separate family, and their recipes by name.

    Runs that were compared with one reference are one list: the first run's variant is the reference.
    """
    all_groups = groups(runs)
    gaps, found = judged(all_groups)
    points, recipes = [], {}
    for number, group in enumerate(all_groups):
        run = next(iter(group.runs.values()))
        of_run, size = recipe_of(run), size_of(run)
        values = [gap for gap in gaps[number].values() if math.isfinite(gap)]
        if not number or group.is_control or not values or of_run is None or not size:
            continue
        setting = described(of_run).setting(of_run.name, size, _tokens(group, all_groups[0]), family=OWN)
        deviation = _deviation(found.get(number), run, len(values))
        points.append(Observed(setting, sum(values) / len(values), len(values), deviation))
        recipes[of_run.name] = of_run
    return points, recipes


def recipe_of(run: Run) -> Recipe | None:
    """The recipe of a run: its own text, else the shipped one of its name; None if it is unknown."""
    try:
        return parse_recipe(run.recipe_text, "recipe.toml") if run.recipe_text else recipe(run.recipe)
    except UserError:
        return None


def _tokens(group: Group, reference: Group) -> float:
    return float(max(gap.tokens for gap in gaps_of(group, reference).values()))


def _deviation(judgement: Judgement | None, run: Run, seeds: int) -> float:
    """The deviation in percent of a mean gap: as measured, else as runs of such a length usually have."""
    if judgement is not None and judgement.spread is not None:
        return judgement.spread.deviation / math.sqrt(seeds)
    return (known_of([run]) or 0.5) / math.sqrt(seeds)

"""The picture of forecasts: gaps over tokens per parameter, their intervals and supporting points.

The curve of each recipe is the law at the size that was asked for; the band is its interval of 90 % for one
pair of runs. Points belong to the recipe itself, at any size; without any, to the nearest recipes, as
hollow rings.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from narrowgauge.forecast.svg import COLORS, Axis, Drawing
from narrowgauge.system.units import human_count

if TYPE_CHECKING:
    from narrowgauge.forecast.forecast import Forecast, Forecaster

_STEPS = 40


def picture(forecasts: Sequence["Forecast"], forecaster: "Forecaster") -> str:
    """The picture as SVG."""
    drawing = Drawing(760, 420, "forecast of the loss gap")
    shown = [one for one in forecasts if one.predicted is not None and one.setting.parts]
    if not shown:
        drawing.text(20, 60, "nothing is forecast: every recipe is a reference or refused")
        return str(drawing)
    params, here = shown[0].params, shown[0].tokens / shown[0].params
    points = {one.recipe: _points(one, forecaster) for one in shown}
    lengths = [length for found in points.values() for length, _, _ in found] + [here]
    x = Axis(min(lengths) / 1.6, max(lengths) * 1.6, 56, 570, is_log=True)
    grid = np.geomspace(x.low, x.high, _STEPS)
    bands = {one.recipe: [_at(one, forecaster, length) for length in grid] for one in shown}
    highest = max(end for band in bands.values() for _, _, end in band[:: _STEPS // 4])
    highest = max(highest, *(_at(one, forecaster, here)[2] for one in shown))
    highest = min(highest, 2.5 * max(mean for band in bands.values() for mean, _, _ in band))
    y = Axis(0, highest, 372, 40)
    drawing.up(x, y, {value: f"{value:g}" for value in y.ticks()})
    drawing.across(x, y.start, {value: f"{value:g}" for value in x.ticks()}, "tokens per parameter")
    for number, one in enumerate(shown):
        color, at = COLORS[number % len(COLORS)], [x(length) for length in grid]
        mean, low, high = ([y(gap) for gap in gaps] for gaps in zip(*bands[one.recipe], strict=True))
        drawing.area(at, low, high, color)
        drawing.line(at, mean, color, 2)
        for length, gap, is_own in points[one.recipe]:
            drawing.dot(x(length), y(gap), 2.6, color, is_hollow=not is_own)
        assert one.predicted is not None
        drawing.dot(x(here), y(one.predicted.gap), 5, color)
        drawing.rect(584, 45 + 20 * number, 10, 10, color)
        drawing.text(600, 54 + 20 * number, f"{one.recipe} {one.predicted.gap:+.2f} %")
    title = (
        f"gap in percent of the loss, {human_count(params)} parameters; bands: 90 % of single pairs of runs"
    )
    drawing.text(x.start, 20, title, font_weight="bold")
    return str(drawing)


def _at(one: "Forecast", forecaster: "Forecaster", length: float) -> tuple[float, float, float]:
    predicted = forecaster.law.predict(one.setting.at(one.params, length * one.params))
    return predicted.gap, *predicted.interval()


def _points(one: "Forecast", forecaster: "Forecaster") -> list[tuple[float, float, bool]]:
    """Tokens per parameter and gap of each point, and whether it is of the recipe itself."""
    own = [o for o in forecaster.observed if o.setting.recipe == one.recipe]
    if own:
        return [(o.setting.tokens_per_param, o.gap, True) for o in own]
    return [(near.tokens / near.params, near.gap_percent, False) for near in one.nearest]

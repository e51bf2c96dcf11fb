"""The results of `probe` and `sensitivity` as tables of the page; a large cost has a strong colour."""

import math
from collections.abc import Sequence

from narrowgauge.trainer.report.page.html import Cell, Table
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.read.stored import Costs, Figure, Probe

_FIGURES = {  # title, format, and the word for an infinite value
    "loss_increase": ("loss increase, nats", ".5f", ""),
    "gradient_cosine": ("gradient cosine", ".5f", ""),
    "gradient_bias": ("gradient bias", "+.5f", ""),
    "effective_bits": ("effective bits", ".2f", "exact"),
    "averaging_slope": ("averaging slope", ".2f", ""),
    "noise_ratio": ("gradient / noise", ".2f", "no noise"),
}
_SHADES = 6  # steps from the smallest cost to the largest, on a logarithmic scale


def analysis(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, Table]]]]:
    """For each run that has any, its name, and what was measured: a text and a table each."""
    found = []
    for run in runs:
        tables = [_probe(run.probe)] if run.probe else []
        tables += [_costs(run.costs)] if run.costs else []
        found += [(run.name, tables)] if tables else []
    return found


def _probe(probe: Probe) -> tuple[str, Table]:
    rows = []
    for recipe, figures in probe.recipes.items():
        cosine = figures.get("gradient_cosine")
        is_broken = isinstance(cosine, Figure) and cosine.mean is None
        cells = (
            _figure(figures.get(key), digits, "" if is_broken else infinite)
            for key, (_, digits, infinite) in _FIGURES.items()
        )
        rows.append([recipe, *cells])
    text = (
        f"What each recipe would do to the weights after step {probe.step:,}, without training: means over "
        "held-out batches and half of their 95 % intervals."
    )
    return text, Table("Probe", ["recipe", *(name for name, *_ in _FIGURES.values())], rows)


def _figure(figure: object, digits: str, infinite: str) -> str:
    """A mean and half its interval; `infinite` replaces a mean that may legitimately be infinite."""
    if not isinstance(figure, Figure):
        return "-"
    if figure.mean is None:
        return infinite or "not finite"
    half = "" if figure.high is None else f" ± {figure.high - figure.mean:{digits.removeprefix('+')}}"
    return f"{figure.mean:{digits}}{half}"


def _costs(found: Costs) -> tuple[str, Table]:
    by_place = {(one.layer, one.place): one for one in found.layers}
    layers, places = (list(dict.fromkeys(key)) for key in zip(*by_place, strict=True))
    marked = {*found.worst, *found.worst_backward}

    def cell(layer: str, place: str) -> str:
        one = by_place.get((layer, place))
        if one is None or one.cost is None:
            return ""
        low, high = _range(found, one.unit)
        share = (math.log(one.cost) - low) / (high - low) if one.cost > 0 and high > low else 0.0
        mark = "*" if f"{layer}.{place}" in marked else ""
        return Cell(f"{one.cost:.1e}{mark}", f"cost-{round(share * _SHADES)}")

    unit = found.forks or (
        "fprop in nats that it adds to the loss; dgrad and wgrad as the share that it takes of what a step "
        "removes from the loss"
    )
    text = (
        f"What one place of one layer in {found.to} would cost after step {found.step:,}: {unit}. Worst "
        f"forward: {', '.join(found.worst)}. Worst backward: {', '.join(found.worst_backward)}."
    )
    rows = [[layer, *(cell(layer, place) for place in places)] for layer in layers]
    return text, Table("Sensitivity", ["layer", *places], rows)


def _range(found: Costs, unit: str) -> tuple[float, float]:
    """The logarithms of the smallest and the largest positive cost in a unit."""
    positive = [math.log(one.cost) for one in found.layers if one.unit == unit and one.cost and one.cost > 0]
    return (min(positive), max(positive)) if positive else (0.0, 0.0)

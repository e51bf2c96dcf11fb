"""The results of `probe` and `sensitivity` as tables of the page; a large cost has a strong colour."""

import math
from collections.abc import Sequence
from html import escape

from narrowgauge.report.read.analysis import Costs, Probe
from narrowgauge.report.read.run import Run

_Figure = tuple[float | None, float | None, float | None]
_FIGURES = {  # title, format, and the word for an infinite value
    "loss_increase": ("loss increase, nats", ".5f", ""),
    "gradient_cosine": ("gradient cosine", ".5f", ""),
    "gradient_bias": ("gradient bias", "+.5f", ""),
    "effective_bits": ("effective bits", ".2f", "exact"),
    "averaging_slope": ("averaging slope", ".2f", ""),
    "noise_ratio": ("gradient / noise", ".2f", "no noise"),
}
_SHADES = 6  # steps from the smallest cost to the largest, on a logarithmic scale


def analysis(runs: Sequence[Run]) -> str:
    """A section with the probe and the costs of each run; empty if no run has any."""
    parts = [
        (f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "")
        + (_probe(run.probe) if run.probe else "")
        + (_costs(run.costs) if run.costs else "")
        for run in runs
        if run.probe or run.costs
    ]
    return (
        f'<section class="analysis"><h2>Which number hurts?</h2>{"".join(parts)}</section>' if parts else ""
    )


def _probe(probe: Probe) -> str:
    head = "".join(f'<th scope="col" class="number">{title}</th>' for title, *_ in _FIGURES.values())
    body = ""
    for recipe, figures in probe.figures.items():
        is_broken = figures.get("gradient_cosine", (0.0,))[0] is None
        cells = (
            _figure(figures.get(key), digits, "" if is_broken else infinite)
            for key, (_, digits, infinite) in _FIGURES.items()
        )
        row = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        body += f'<tr><th scope="row">{escape(recipe)}</th>{row}</tr>'
    return (
        f"<p>What each recipe would do to the weights after step {probe.step:,}, without training: means "
        "over held-out batches and half of their 95 % intervals.</p>"
        + _scrolled("Probe", f'<th scope="col">recipe</th>{head}', body)
    )


def _figure(values: _Figure | None, digits: str, infinite: str) -> str:
    """A mean and half its interval; `infinite` replaces a mean that may legitimately be infinite."""
    if values is None:
        return "-"
    mean, _, high = values
    if mean is None:
        return infinite or "not finite"
    half = "" if high is None else f" &#177; {high - mean:{digits.removeprefix('+')}}"
    return f"{mean:{digits}}{half}"


def _costs(found: Costs) -> str:
    layers = list(dict.fromkeys(layer for layer, _ in found.costs))
    places = list(dict.fromkeys(place for _, place in found.costs))
    head = "".join(f'<th scope="col" class="number">{escape(place)}</th>' for place in places)
    ranges = {unit: _range(found, unit) for unit in set(found.units.values())}
    marked = {*found.worst, *found.worst_backward}
    body = ""
    for layer in layers:
        row = ""
        for place in places:
            cost = found.costs.get((layer, place))
            if cost is None:
                row += "<td></td>"
                continue
            low, high = ranges[found.units[place]]
            share = (math.log(cost) - low) / (high - low) if cost > 0 and high > low else 0.0
            mark = "*" if f"{layer}.{place}" in marked else ""
            row += f'<td class="number cost-{round(share * _SHADES)}">{cost:.1e}{mark}</td>'
        body += f'<tr><th scope="row">{escape(layer)}</th>{row}</tr>'
    worst, backward = (", ".join(map(escape, names)) for names in (found.worst, found.worst_backward))
    unit = found.forks or (
        "fprop in nats that it adds to the loss; dgrad and wgrad as the share that it takes of what a step "
        "removes from the loss"
    )
    return (
        f"<p>What one place of one layer in {escape(found.cast)} would cost after step {found.step:,}: "
        f"{escape(unit)}. Worst forward: {worst}. Worst backward: {backward}.</p>"
        + _scrolled("Sensitivity", f'<th scope="col">layer</th>{head}', body)
    )


def _range(found: Costs, unit: str) -> tuple[float, float]:
    """The logarithms of the smallest and the largest positive cost in a unit."""
    costs = (cost for (_, place), cost in found.costs.items() if found.units[place] == unit)
    positive = [math.log(cost) for cost in costs if cost > 0]
    return (min(positive), max(positive)) if positive else (0.0, 0.0)


def _scrolled(label: str, head: str, body: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )

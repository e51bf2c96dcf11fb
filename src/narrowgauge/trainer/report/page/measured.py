"""What a run measured of itself: the results of `probe` and `sensitivity`, memory, time, and its layers.

Memory and the time of a step are stacked bars of one scale by class, and a table of their values. A part is
told apart by its colour, its hatching and, if there is room, its name; it shows its value on hover or focus.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.report.page.html import Table, text_of
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.read.stored import (
    Audit,
    Costs,
    Figure,
    Memory,
    Probe,
    StepTime,
)
from narrowgauge.trainer.report.table import Cell

HATCHES = 8  # patterns in page.css
FIGURES = {  # title, format, and the word for an infinite value
    "loss_increase": ("loss increase, nats", ".5f", ""),
    "gradient_cosine": ("gradient cosine", ".5f", ""),
    "gradient_bias": ("gradient bias", "+.5f", ""),
    "effective_bits": ("effective bits", ".2f", "exact"),
    "averaging_slope": ("averaging slope", ".2f", ""),
    "noise_ratio": ("gradient / noise", ".2f", "no noise"),
}
_SHADES = 6  # steps from the smallest cost to the largest, on a logarithmic scale
_LAYERS = 400  # rows of linear layers at most, of all runs together


def analysis(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, Table]]]]:
    """For each run that has any, its name, and what was measured: a text and a table each."""
    found = []
    for run in runs:
        tables = []
        if run.probe:
            text = (
                f"What each recipe would do to the weights after step {run.probe.step:,}, without training: "
                "means over held-out batches and half of their 95 % intervals."
            )
            tables.append((text, probe_table(run.probe)))
        tables += [_costs(run.costs)] if run.costs else []
        found += [(run.name, tables)] if tables else []
    return found


def probe_table(probe: Probe, more: Sequence[Sequence[str]] = ()) -> Table:
    """The figures of each recipe, and more lines."""
    rows = []
    for recipe, figures in probe.recipes.items():
        cosine = figures.get("gradient_cosine")
        is_broken = isinstance(cosine, Figure) and cosine.mean is None
        cells = (
            _figure(figures.get(key), digits, "" if is_broken else infinite)
            for key, (_, digits, infinite) in FIGURES.items()
        )
        rows.append([recipe, *cells])
    return Table("Probe", ["recipe", *(name for name, *_ in FIGURES.values())], [*rows, *more])


def _figure(figure: object, digits: str, infinite: str) -> str:
    """A mean and half its interval; `infinite` replaces a mean that may legitimately be infinite."""
    if not isinstance(figure, Figure):
        return "-"
    if figure.mean is None:
        return infinite or "not finite"
    half = "" if figure.high is None else f" ± {figure.high - figure.mean:{digits.removeprefix('+')}}"
    return f"{figure.mean:{digits}}{half}"


def _costs(found: Costs) -> tuple[str, Table]:
    """The costs of layers and places; a large one has a strong colour among those of its unit."""
    by_place = {(one.layer, one.place): one for one in found.layers}
    layers, places = (list(dict.fromkeys(key)) for key in zip(*by_place, strict=True))
    marked = {*found.worst, *found.worst_backward}

    def cell(layer: str, place: str) -> str:
        one = by_place.get((layer, place))
        if one is None or one.cost is None:
            return ""
        logs = [math.log(of.cost) for of in found.layers if of.unit == one.unit and of.cost and of.cost > 0]
        low, high = min(logs, default=0.0), max(logs, default=0.0)
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


@dataclass(frozen=True)
class Bar:
    """One bar."""

    name: str  # the text at the head of the bar
    sizes: Mapping[str, float]  # sizes by class, in stacking order; none is negative
    texts: Mapping[str, str]  # the sizes as texts
    total: str  # the text at the end of the bar
    mark: float = 0.0  # a size marked with a line, such as a limit


@dataclass(frozen=True)
class ByClass:
    """Bars, and further rows of their table; `label` is the accessible name."""

    label: str
    bars: Sequence[Bar]
    more: Mapping[str, Sequence[str]]

    @property
    def hatches(self) -> dict[str, int]:
        """The number of the pattern of each class, in the order of the key."""
        names = dict.fromkeys(name for bar in self.bars for name in bar.sizes)
        return {name: number % HATCHES for number, name in enumerate(names)}

    def share(self, size: float) -> float:
        """A size in percent of the longest bar."""
        return 100 * size / (max(max(sum(bar.sizes.values()), bar.mark) for bar in self.bars) or 1.0)

    def table(self) -> Table:
        """A row for each class, a column for each bar."""
        rows = [[name, *(bar.texts.get(name, "-") for bar in self.bars)] for name in self.hatches]
        rows += [[name, *texts] for name, texts in self.more.items()]
        return Table(self.label, ["class", *(bar.name for bar in self.bars)], rows)


def memory(runs: Sequence[Run]) -> ByClass | None:
    """The bytes of each class, and per parameter; None if no run has recorded them."""
    bars, more = [], dict[str, list[str]]()
    for run in runs:
        if (found := run.last_event("memory", Memory)) is None:
            continue
        sizes = {kind: size for kind, size in found.bytes.items() if size}
        texts = {kind: f"{human_bytes(n)} ({n / found.parameters:.2f})" for kind, n in sizes.items()}
        bars.append(Bar(run.name, sizes, texts, human_bytes(found.peak), found.expected.peak))
        more.setdefault("together", []).append(human_bytes(found.peak))
        more.setdefault("expected", []).append(human_bytes(found.expected.peak))
        if found.host_bytes:
            more.setdefault("on the host", []).append(human_bytes(sum(found.host_bytes.values())))
    return ByClass("Memory by class", bars, more) if bars else None


def step_time(runs: Sequence[Run]) -> ByClass | None:
    """Two bars for each run, measured and floor; None without profiles."""
    bars = []
    for run in runs:
        if (found := run.last_event("step time", StepTime)) is not None:
            bars += [_bar(run.name, found.ms)]
            bars += [_bar(f"{run.name}, floor", found.floor_ms)] if found.floor_ms else []
    return ByClass("Step time by class", bars, {"together": [bar.total for bar in bars]}) if bars else None


def _bar(name: str, times: Mapping[str, float]) -> Bar:
    texts = {kind: f"{ms:.4g} ms" for kind, ms in times.items()}
    return Bar(name, times, texts, f"{sum(times.values()):.4g} ms")


def audit(runs: Sequence[Run]) -> list[tuple[str, Table, int]]:
    """(title, table, number of layers left out) of each run that has recorded its layers.

    What each linear layer computed in, whether it was called, and whether a gradient reached it: a run under
    a narrow recipe records it in its first step (`nn.audit`), each process for its own part of the model.
    """
    audited = [(run.name, found.layers) for run in runs if (found := run.last_event("audit", Audit))]
    most = max(4, _LAYERS // max(1, len(audited)))
    tables = []
    for name, layers in audited:
        noted = sum(bool(layer.note) for layer in layers)
        of_run = "" if len(runs) == 1 else f" of {name}"
        title = f"The linear layers{of_run} in the first step: {len(layers):,}, {noted:,} with a note"
        shown = sorted(layers, key=lambda layer: not layer.note)[:most]
        rows = [
            ["-" if value is None else text_of(value)[:300] for value in vars(layer).values()]
            for layer in shown
        ]
        head = ("layer", "cast", "calls", "gradient", "note")
        table = Table("Linear layers", head, rows, None, is_code=True)
        tables.append((title, table, max(0, len(layers) - most)))
    return tables

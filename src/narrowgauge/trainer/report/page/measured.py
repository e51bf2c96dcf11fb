"""What a run measured of itself: gauges, the results of `probe` and `sensitivity`, memory, time, its layers.

Each line of `gauges.jsonl` (one layer and place) becomes one value for each gauge, in a readable unit. The
page's script fills a heat map with them; a table of the last readings needs no script.

    sqnr         signal to quantization noise, dB
    underflow, zeros, largest, clipped, nonfinite      percent of the elements
    amax         largest magnitude
    spread       octaves from the median of the blocks' largest magnitudes up to the largest
    scales       octaves from the smallest scale to the largest
    bias         mean error, percent of the root mean square
    unlike       1 - cosine of a matmul and the same matmul in float32

The size of a page is limited. If a run has too many layers, the ones with the most noise are shown; if it has
too many steps, every n-th and the last. Histograms are larger, so fewer steps keep theirs.

Memory and the time of a step are stacked bars of one scale by class, and a table of their values. A part is
told apart by its colour, its hatching and, if there is room, its name; it shows its value on hover or focus.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from narrowgauge.formats import Format, format, format_names
from narrowgauge.quantization.gauges.bins import bins_of
from narrowgauge.recipes.places import GAUGED_PLACES
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.report.page.curves import round_digits, thin
from narrowgauge.trainer.report.page.html import Table, text_of
from narrowgauge.trainer.report.read.records import as_float
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.read.stored import Audit, Costs, Figure, Memory, Probe, StepTime
from narrowgauge.trainer.report.table import Cell, listed

SHARES = ("underflow", "zeros", "largest", "clipped", "nonfinite")
GAUGES = ("sqnr", *SHARES, "amax", "spread", "scales", "bias", "unlike")
LAYERS, LAYERS_OF_ALL = 100, 400  # at most, in one run and in all runs
NUMBERS_PER_PAGE = 220_000  # about 6 bytes each
HISTOGRAMS_PER_PAGE = 4000  # about 300 bytes each

Counts = Annotated[list[int], Field(max_length=1000)]
Line = Mapping[str, Any]
Reading = dict[tuple[str, str], Line]  # lines of one step by (layer, place)


class Histogram(BaseModel):
    """The magnitudes of a tensor in bins of equal parts of an octave, and its zeros."""

    model_config = ConfigDict(strict=True)

    element: str  # a format
    per_octave: int = Field(gt=0)
    first: int = Field(gt=-10_000, lt=10_000)  # the first bin
    zeros: list[int] = Field(min_length=2, max_length=2)  # before and after rounding, as the bins
    before: Counts
    after: Counts

    @model_validator(mode="after")
    def _require_bins_of_a_format(self) -> Self:
        if self.element not in format_names() or len(self.before) != len(self.after):
            raise ValueError(self)
        return self


def heat_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The readings of all runs with gauges, and the limits of their formats, ready for JSON."""
    measured = [(number, run) for number, run in enumerate(runs) if run.gauges]
    run_data = [{"run": number, **_run_data(run, len(measured))} for number, run in measured]
    names = {h["element"] for data in run_data for h in data["histograms"]}
    return {"runs": run_data, "formats": {name: _limits(format(name)) for name in sorted(names)}}


def _limits(fmt: Format) -> dict[str, float]:
    limits = {"max": fmt.max, "normal": fmt.smallest_normal, "smallest": fmt.smallest_subnormal}
    limits["low"] = bins_of(fmt).low  # the exponent at which the bins of a histogram begin
    return limits | {"mantissa": fmt.mantissa_bits, "fixed": fmt.is_fixed_point}


def readings(run: Run) -> dict[int, Reading]:
    """The readings by step, ascending; for a layer and place read twice, the last line counts."""
    by_step: dict[int, Reading] = {}
    for line in run.gauges:
        by_step.setdefault(line["step"], {})[line["layer"], line["place"]] = line
    return dict(sorted(by_step.items()))


def noisiest(reading: Reading, most: int) -> list[str]:
    """The `most` layers with the most noise, in the order of the reading."""
    worst: dict[str, float] = {}
    for (layer, _), line in reading.items():
        decibels = as_float(line.get("sqnr_db"))
        worst[layer] = min(worst.get(layer, math.inf), math.inf if math.isnan(decibels) else decibels)
    kept = set(sorted(worst, key=lambda layer: worst[layer])[:most])
    return [layer for layer in worst if layer in kept]


def layers_per_run(runs: int) -> int:
    """Number of layers shown for each of `runs` runs."""
    return max(1, min(LAYERS, LAYERS_OF_ALL // runs))


def _run_data(run: Run, runs: int) -> dict[str, Any]:
    by_step = readings(run)
    last = by_step[max(by_step)]
    layers = noisiest(last, layers_per_run(runs))
    present = {place for reading in by_step.values() for _, place in reading}
    places = [place for place in GAUGED_PLACES if place in present]
    numbers_per_step = len(layers) * max(1, len(places)) * len(GAUGES)
    steps = thin(list(by_step), max(1, NUMBERS_PER_PAGE // runs // numbers_per_step))
    figures = {(s, *key): _figures(line) for s in steps for key, line in by_step[s].items()}
    values: dict[str, dict[str, list[list[float | None]]]] = {gauge: {} for gauge in GAUGES}
    for gauge, place in product(GAUGES, places):  # as [step][layer]; a place without any value is left out
        rows = [[figures.get((s, layer, place), {}).get(gauge) for layer in layers] for s in steps]
        if any(value is not None for row in rows for value in row):
            values[gauge][place] = rows
    return {
        "steps": steps,
        "layers": layers,
        "places": places,
        "casts": [[str(last.get((layer, p), {}).get("cast") or "") for p in places] for layer in layers],
        "values": values,
        "histograms": _histograms({s: by_step[s] for s in steps}, layers, places, runs),
    }


def _figures(line: Line) -> dict[str, float | None]:
    """The values of one line by gauge; None if the line lacks one."""
    amax, scales = _floats(line.get("amax"), 3), _floats(line.get("scales"), 2)
    figures = {"sqnr": as_float(line.get("sqnr_db"))}
    figures |= {share: 100 * as_float(line.get(share)) for share in SHARES}
    figures["amax"] = amax[2]
    figures["spread"] = _octaves(amax[1], amax[2]) if amax[0] < amax[2] else math.nan
    figures["scales"] = _octaves(*scales) if scales[0] < scales[1] else math.nan
    rms = as_float(line.get("rms"))
    figures["bias"] = 100 * as_float(line.get("mean_error")) / rms if rms else math.nan
    figures["unlike"] = 1 - as_float(line.get("cosine"))
    return {gauge: round_digits(value, 3) for gauge, value in figures.items()}


def _histograms(
    by_step: Mapping[int, Reading], layers: Sequence[str], places: Sequence[str], runs: int
) -> list[dict[str, Any]]:
    """The histograms of as many steps as fit, with the indices of their step, layer and place."""
    found: dict[int, list[dict[str, Any]]] = {}
    for i, (step, reading) in enumerate(by_step.items()):
        found[step] = []
        for (layer, place), line in reading.items():
            if layer in layers and place in places:
                with suppress(ValidationError):
                    bins = Histogram.model_validate(line.get("histogram")).model_dump()
                    found[step].append({"at": [i, layers.index(layer), places.index(place)], **bins})
    most = max(map(len, found.values()), default=0)
    kept = thin(list(found), max(1, HISTOGRAMS_PER_PAGE // runs // most)) if most else []
    return [histogram for step in kept for histogram in found[step]]


def _floats(value: object, count: int) -> list[float]:
    """A JSON list of `count` numbers; NaNs if it is not one."""
    is_list = isinstance(value, list) and len(value) == count
    return [as_float(v) for v in value] if is_list else [math.nan] * count  # type: ignore[attr-defined]


def _octaves(low: float, high: float) -> float:
    return math.log2(high / low) if low > 0 and high < math.inf else math.nan


def gauges(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """The title and the table of the last readings of each run that has any; of its noisiest layers."""
    tables, measured = [], [run for run in runs if run.gauges]
    for run in measured:
        most = layers_per_run(len(measured))
        step, last = max(readings(run).items())
        reading: Reading = {key: line for key, line in last.items() if _cell(line)}
        layers, chosen = {layer for layer, _ in reading}, noisiest(reading, most)
        present = {place for layer, place in reading if layer in chosen}
        columns = [place for place in GAUGED_PLACES if place in present]
        rows = [[layer, *(_cell(reading.get((layer, place))) for place in columns)] for layer in chosen]
        selection = f", the {most} noisiest of {len(layers)} layers" if len(layers) > most else ""
        title = f"{run.name}, step {step:,}{selection}"
        tables.append((title, Table(f"Gauges of {run.name}", ["layer", *columns], rows)))
    return tables


def no_gauges(runs: Sequence[Run]) -> list[str]:
    """A sentence for each reason why runs have no readings."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        if not run.gauges:
            by_reason.setdefault(_why_none(run), []).append(run.name)
    return [
        f"No gauges{'' if len(names) == len(runs) else f' of {listed(names)}'}: {reason}."
        for reason, names in by_reason.items()
    ]


def _why_none(run: Run) -> str:
    """Why a run has no readings, to complete a sentence."""
    every = run.setting("gauges", "every")
    if run.setting("training", "compile") is True:
        return "training.compile = true, and compiled code cannot be read"
    if every == 0:
        return "gauges.every = 0 switched them off; --gauges.every 100 reads every 100th step and the last"
    if not run.steps:
        return "no step has been recorded yet"
    if isinstance(every, int) and run.steps[-1].step < every:
        return (
            f"gauges.every = {every:,}, and step {run.steps[-1].step:,} was the last; besides every "
            f"{every:,}th step only the last step of a completed run is read"
        )
    return "gauges.jsonl is missing or empty; it belongs next to metrics.jsonl in the run directory"


def _cell(line: Mapping[str, Any] | None) -> str:
    """The text for one place of a layer; empty if nothing was lost."""
    if line is None:
        return ""
    if "cosine" in line:
        return f"{as_float(line['cosine']):.5f}"
    decibels, underflow = as_float(line.get("sqnr_db")), as_float(line.get("underflow"))
    if as_float(line.get("nonfinite")) > 0:
        return "not finite"
    if math.isnan(decibels) and not underflow > 0:  # the cast added no noise
        return ""
    lost = f"{100 * underflow:.1f} %" if underflow >= 0.0005 else "<0.1 %"
    return f"{decibels:.1f} dB" + (f", {lost}" if underflow > 0 else "")


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


class Bar(NamedTuple):
    """One bar."""

    name: str  # the text at the head of the bar
    sizes: Mapping[str, float]  # sizes by class, in stacking order; none is negative
    texts: Mapping[str, str]  # the sizes as texts
    total: str  # the text at the end of the bar
    mark: float = 0.0  # a size marked with a line, such as a limit


def _by_class(label: str, bars: Sequence[Bar], more: Mapping[str, Sequence[str]]) -> dict[str, Any] | None:
    """Bars with the number of each class's pattern, and a table with a row for each class and `more` rows."""
    names = list(dict.fromkeys(name for bar in bars for name in bar.sizes))
    rows = [[name, *(bar.texts.get(name, "-") for bar in bars)] for name in names]
    rows += [[name, *texts] for name, texts in more.items()]
    longest = max((max(sum(bar.sizes.values()), bar.mark) for bar in bars), default=0) or 1.0
    hatches = {name: number % HATCHES for number, name in enumerate(names)}
    table = Table(label, ["class", *(bar.name for bar in bars)], rows)
    return {"bars": bars, "longest": longest, "hatches": hatches, "table": table} if bars else None


def memory(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The bytes of each class, and per parameter; None if no run has recorded them."""
    bars, more = list[Bar](), dict[str, list[str]]()
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
    return _by_class("Memory by class", bars, more)


def step_time(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Two bars for each run, measured and floor; None without profiles."""
    bars = []
    for run in runs:
        if (found := run.last_event("step time", StepTime)) is None:
            continue
        for name, times in ((run.name, found.ms), (f"{run.name}, floor", found.floor_ms)):
            if times:
                texts = {kind: f"{ms:.4g} ms" for kind, ms in times.items()}
                bars.append(Bar(name, times, texts, f"{sum(times.values()):.4g} ms"))
    return _by_class("Step time by class", bars, {"together": [bar.total for bar in bars]})


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

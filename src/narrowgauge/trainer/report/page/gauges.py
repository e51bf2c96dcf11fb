"""The gauges of each layer and place: a heat map that the page's script fills, and a table that needs no
script.

Each line of `gauges.jsonl` (one layer and place) becomes one value for each gauge, in a readable unit:

    sqnr         signal to quantization noise, dB
    underflow, zeros, largest, clipped, nonfinite      percent of the elements
    amax         largest magnitude
    spread       octaves from the median of the blocks' largest magnitudes up to the largest
    scales       octaves from the smallest scale to the largest
    bias         mean error, percent of the root mean square
    unlike       1 - cosine of a matmul and the same matmul in float32

The size of a page is limited. If a run has too many layers, the ones with the most noise are shown; if it has
too many steps, every n-th and the last. Histograms are larger, so fewer steps keep theirs.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from narrowgauge.formats import format, format_names
from narrowgauge.quantization.gauges.bins import bins_of
from narrowgauge.recipes.places import GAUGED_PLACES
from narrowgauge.trainer.report.page.curves import round_digits, thin
from narrowgauge.trainer.report.page.html import Table
from narrowgauge.trainer.report.read.records import as_float
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.table import listed

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


def heat_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The readings of all runs with gauges, and the limits of their formats, ready for JSON."""
    measured = [(number, run) for number, run in enumerate(runs) if run.gauges]
    run_data = [{"run": number, **_run_data(run, len(measured))} for number, run in measured]
    names = {h["element"] for data in run_data for h in data["histograms"]}
    return {"runs": run_data, "formats": {name: _limits(name) for name in sorted(names)}}


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
        worst[layer] = min(worst.get(layer, math.inf), decibels if decibels == decibels else math.inf)
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
        found[step] = [
            {"at": [i, layers.index(layer), places.index(place)], **histogram}
            for (layer, place), line in reading.items()
            if layer in layers and place in places and (histogram := _histogram(line.get("histogram")))
        ]
    most = max(map(len, found.values()), default=0)
    kept = thin(list(found), max(1, HISTOGRAMS_PER_PAGE // runs // most)) if most else []
    return [histogram for step in kept for histogram in found[step]]


def _histogram(value: object) -> dict[str, Any] | None:
    """A recorded histogram if all its fields are valid, else None."""
    try:
        found = Histogram.model_validate(value)
    except ValidationError:
        return None
    is_valid = found.element in format_names() and len(found.before) == len(found.after)
    return found.model_dump() if is_valid else None


def _limits(name: str) -> dict[str, float]:
    fmt = format(name)
    limits = {"max": fmt.max, "normal": fmt.smallest_normal, "smallest": fmt.smallest_subnormal}
    limits["low"] = bins_of(fmt).low  # the exponent at which the bins of a histogram begin
    return limits | {"mantissa": fmt.mantissa_bits, "fixed": fmt.is_fixed_point}


def _floats(value: object, count: int) -> list[float]:
    """A JSON list of `count` numbers; NaNs if it is not one."""
    is_list = isinstance(value, list) and len(value) == count
    return [as_float(v) for v in value] if is_list else [math.nan] * count  # type: ignore[attr-defined]


def _octaves(low: float, high: float) -> float:
    return math.log2(high / low) if low > 0 and high < math.inf else math.nan


def gauges(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """The title and the table of the last readings of each run that has any."""
    measured = [run for run in runs if run.gauges]
    return [_run_table(run, layers_per_run(len(measured))) for run in measured]


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


def _run_table(run: Run, most: int) -> tuple[str, Table]:
    """The table of a run; if it has many layers, only those with the most noise."""
    by_step = readings(run)
    reading: Reading = {key: line for key, line in by_step[max(by_step)].items() if _cell(line)}
    layers = {layer for layer, _ in reading}
    chosen = noisiest(reading, most)
    present = {place for layer, place in reading if layer in chosen}
    columns = [place for place in GAUGED_PLACES if place in present]
    rows = [[layer, *(_cell(reading.get((layer, place))) for place in columns)] for layer in chosen]
    selection = f", the {most} noisiest of {len(layers)} layers" if len(layers) > most else ""
    title = f"{run.name}, step {max(by_step):,}{selection}"
    return title, Table(f"Gauges of {run.name}", ["layer", *columns], rows)


def _cell(line: Mapping[str, Any] | None) -> str:
    """The text for one place of a layer; empty if nothing was lost."""
    if line is None:
        return ""
    if "cosine" in line:
        return f"{as_float(line['cosine']):.5f}"
    decibels, underflow = as_float(line.get("sqnr_db")), as_float(line.get("underflow"))
    if as_float(line.get("nonfinite")) > 0:
        return "not finite"
    if not (decibels == decibels or underflow > 0):  # NaN: there is no noise
        return ""
    return f"{decibels:.1f} dB" + (f", {_percent(underflow)}" if underflow > 0 else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "<0.1 %"

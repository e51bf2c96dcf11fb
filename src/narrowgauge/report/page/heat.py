"""The readings of the gauges for the page: a map of layers and places for each gauge and step.

What `gauges.jsonl` says of a layer and place becomes one number a gauge, in a unit for people:

    sqnr         signal to quantization noise, dB
    underflow, zeros, largest, clipped, nonfinite      percent of the elements
    amax         largest magnitude
    spread       octaves from the median of the blocks' largest magnitudes up to the largest
    scales       octaves from the smallest scale to the largest
    bias         mean error, percent of the root mean square
    unlike       1 - cosine of a product and the same product in float32

A page has room for so many numbers. Where a run has more layers, those with the most noise are shown; where
it has more steps, every n-th and the last. Histograms are larger, and kept of fewer steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.formats import format, format_names
from narrowgauge.quantization.gauges.histogram import bins_of
from narrowgauge.recipes import GEMM_PLACES
from narrowgauge.report.page.curves import thin
from narrowgauge.report.read.records import as_float
from narrowgauge.report.read.run import Run

PRODUCTS = ("fprop.y", "dgrad.dx", "wgrad.dw")
STATE = ("weight", "master", "grad", "m", "v")
ORDER = (*GEMM_PLACES, "saved", *PRODUCTS, *STATE)
SHARES = ("underflow", "zeros", "largest", "clipped", "nonfinite")
GAUGES = ("sqnr", *SHARES, "amax", "spread", "scales", "bias", "unlike")
LAYERS, LAYERS_OF_ALL = 100, 400  # of one run, of all of them
NUMBERS_PER_PAGE = 220_000  # some 6 bytes each
HISTOGRAMS_PER_PAGE = 4000  # some 300 bytes each

Line = Mapping[str, Any]
Reading = dict[tuple[str, str], Line]  # of a step, by layer and place


def heat_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The readings of all runs that have any, and the limits of the formats in them, ready for JSON."""
    told = [(number, run) for number, run in enumerate(runs) if run.gauges]
    of_runs = [{"run": number, **_of_run(run, len(told))} for number, run in told]
    names = {h["element"] for data in of_runs for h in data["histograms"]}
    return {"runs": of_runs, "formats": {name: _limits(name) for name in sorted(names)}}


def readings(run: Run) -> dict[int, Reading]:
    """What was read, by step in their order; of a layer and place that was read twice, the last."""
    found: dict[int, Reading] = {}
    for line in run.gauges:
        found.setdefault(line["step"], {})[line["layer"], line["place"]] = line
    return dict(sorted(found.items()))


def noisiest(reading: Reading, most: int) -> list[str]:
    """At most so many layers, those with the most noise, in the order in which they were read."""
    worst: dict[str, float] = {}
    for (layer, _), line in reading.items():
        decibels = as_float(line.get("sqnr_db"))
        worst[layer] = min(worst.get(layer, math.inf), decibels if decibels == decibels else math.inf)
    kept = set(sorted(worst, key=lambda layer: worst[layer])[:most])
    return [layer for layer in worst if layer in kept]


def layers_of_each(runs: int) -> int:
    """How many layers of each of so many runs have room."""
    return max(1, min(LAYERS, LAYERS_OF_ALL // runs))


def _of_run(run: Run, runs: int) -> dict[str, Any]:
    every = readings(run)
    last = every[max(every)]
    layers = noisiest(last, layers_of_each(runs))
    here = {place for reading in every.values() for _, place in reading}
    places = [place for place in ORDER if place in here]
    a_step = len(layers) * max(1, len(places)) * len(GAUGES)
    steps = thin(list(every), max(1, NUMBERS_PER_PAGE // runs // a_step))
    figures = {(s, *key): _figures(line) for s in steps for key, line in every[s].items()}
    return {
        "steps": steps,
        "layers": layers,
        "places": places,
        "casts": [[str(last.get((layer, p), {}).get("cast") or "") for p in places] for layer in layers],
        "values": {gauge: _by_place(figures, gauge, steps, layers, places) for gauge in GAUGES},
        "histograms": _histograms({s: every[s] for s in steps}, layers, places, runs),
    }


def _by_place(
    figures: Mapping[tuple[int, str, str], Mapping[str, float | None]],
    gauge: str,
    steps: Sequence[int],
    layers: Sequence[str],
    places: Sequence[str],
) -> dict[str, list[list[float | None]]]:
    """[step][layer] of one gauge by place; places without any are left out."""
    found = {p: [[figures.get((s, la, p), {}).get(gauge) for la in layers] for s in steps] for p in places}
    return {p: rows for p, rows in found.items() if any(v is not None for row in rows for v in row)}


def _figures(line: Line) -> dict[str, float | None]:
    """The numbers of one line, by gauge; None where it does not say."""
    amax, scales = _floats(line.get("amax"), 3), _floats(line.get("scales"), 2)
    found = {"sqnr": as_float(line.get("sqnr_db"))}
    found |= {share: 100 * as_float(line.get(share)) for share in SHARES}
    found["amax"] = amax[2]
    found["spread"] = _octaves(amax[1], amax[2]) if amax[0] < amax[2] else math.nan
    found["scales"] = _octaves(*scales) if scales[0] < scales[1] else math.nan
    rms = as_float(line.get("rms"))
    found["bias"] = 100 * as_float(line.get("mean_error")) / rms if rms else math.nan
    found["unlike"] = 1 - as_float(line.get("cosine"))
    return {gauge: _short(value) for gauge, value in found.items()}


def _histograms(
    every: Mapping[int, Reading], layers: Sequence[str], places: Sequence[str], runs: int
) -> list[dict[str, Any]]:
    """The histograms of as many steps as have room, with the numbers of their step, layer and place."""
    steps, shown = list(every), {name: i for i, name in enumerate(layers)}
    column = {name: i for i, name in enumerate(places)}
    of_step = {
        s: [
            {"at": [i, shown[layer], column[place]], **histogram}
            for (layer, place), line in every[s].items()
            if layer in shown and place in column and (histogram := _whole(line.get("histogram")))
        ]
        for i, s in enumerate(steps)
    }
    most = max((len(found) for found in of_step.values()), default=0)
    kept = thin(steps, max(1, HISTOGRAMS_PER_PAGE // runs // most)) if most else []
    return [histogram for s in kept for histogram in of_step[s]]


def _whole(found: object) -> dict[str, Any] | None:
    """A histogram whose parts are what they should be, or None."""
    if not isinstance(found, Mapping) or found.get("element") not in format_names():
        return None
    lists = [found.get(key) for key in ("zeros", "before", "after")]
    numbers = [found.get("first"), found.get("per_octave")]
    for part in lists:
        if not isinstance(part, list) or len(part) > 1000:
            return None
        numbers += part
    if not all(type(n) is int for n in numbers) or len(lists[1] or ()) != len(lists[2] or ()):
        return None
    is_good = found["per_octave"] > 0 and len(found["zeros"]) == 2 and abs(found["first"]) < 10_000
    return {key: found[key] for key in _KEYS} if is_good else None


_KEYS = ("element", "per_octave", "first", "zeros", "before", "after")


def _limits(name: str) -> dict[str, float]:
    fmt = format(name)
    limits = {"max": fmt.max, "normal": fmt.smallest_normal, "smallest": fmt.smallest_subnormal}
    limits["low"] = bins_of(fmt).low  # the exponent at which the bins of a histogram begin
    return limits | {"mantissa": fmt.mantissa_bits, "fixed": fmt.is_fixed_point}


def _floats(value: object, count: int) -> list[float]:
    """A JSON list of so many numbers; NaNs where it is not one."""
    is_list = isinstance(value, list) and len(value) == count
    return [as_float(v) for v in value] if is_list else [math.nan] * count  # type: ignore[attr-defined]


def _octaves(low: float, high: float) -> float:
    return math.log2(high / low) if low > 0 and high < math.inf else math.nan


def _short(value: float) -> float | None:
    """Three digits are what a cell shows; None for what is not finite."""
    return float(f"{value:.3g}") if math.isfinite(value) else None

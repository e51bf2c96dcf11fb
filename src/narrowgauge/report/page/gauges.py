"""The gauges of each layer and place: a map that the page's script fills (`heat`), and the last readings as
a table that needs no script."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.report.page.heat import ORDER, Reading, layers_per_run, noisiest, readings
from narrowgauge.report.read.records import as_float
from narrowgauge.report.read.run import Run

NAMES = 4  # of runs without readings, that are listed


def gauges(runs: Sequence[Run], host: str = "") -> str:
    """A section with the map's host element and a table for each run with readings.

    A run without readings is named with the reason.
    """
    measured = [run for run in runs if run.gauges]
    missing = "".join(f"<p>{escape(sentence)}</p>" for sentence in _missing(runs))
    if not measured:
        return f'<section class="gauges"><h2>Gauges</h2>{missing}</section>'
    most = layers_per_run(len(measured))
    return (
        f'<section class="gauges"><h2>Gauges</h2>{missing}{host}'
        "<details><summary>The last readings as a table</summary>"
        f"{''.join(_run_table(run, most) for run in measured)}"
        "<p>For each place: the signal to quantization noise in decibels, and the share of numbers that "
        "became zero (underflow); at 20 dB the noise is a tenth of the numbers. For products (y, dx, dw): "
        "the cosine of the angle to the same product in float32. Places without loss are left out; a tensor "
        "shared by two products is reported under the place that quantized it. All other figures: "
        "gauges.jsonl.</p></details></section>"
    )


def _missing(runs: Sequence[Run]) -> list[str]:
    """A sentence for each reason why runs have no readings."""
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        if not run.gauges:
            by_reason.setdefault(_why_none(run), []).append(run.name)
    return [
        f"No gauges{'' if len(names) == len(runs) else f' of {_listed(names)}'}: {reason}."
        for reason, names in by_reason.items()
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES])
    return shown + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


def _why_none(run: Run) -> str:
    """Why a run has no readings, as the rest of a sentence."""
    training, section = (run.config.get(name) for name in ("training", "gauges"))
    every = section.get("every") if isinstance(section, Mapping) else None
    if isinstance(training, Mapping) and training.get("compile") is True:
        return "training.compile = true, and compiled code cannot be read"
    if every == 0:
        return "gauges.every = 0 switched them off; --gauges.every 100 reads every 100th step and the last"
    if not run.steps:
        return "no step has been recorded yet"
    if isinstance(every, int) and run.steps[-1].step < every:
        return (
            f"gauges.every = {every:,}, and step {run.steps[-1].step:,} was the last; beside every "
            f"{every:,}th step only the last of a run that comes to its end is read"
        )
    return "gauges.jsonl is missing or empty; it lies beside metrics.jsonl in the run directory"


def _run_table(run: Run, most: int) -> str:
    """The table of a run; if it has many layers, only those with the most noise."""
    by_step = readings(run)
    reading: Reading = {key: line for key, line in by_step[max(by_step)].items() if _cell(line)}
    layers = list(dict.fromkeys(layer for layer, _ in reading))
    chosen = {
        name: {place: line for (layer, place), line in reading.items() if layer == name}
        for name in noisiest(reading, most)
    }
    columns = [place for place in ORDER if any(_cell(places.get(place)) for places in chosen.values())]
    head = "".join(f'<th scope="col" class="number">{escape(place)}</th>' for place in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="number">{escape(_cell(places.get(place)))}</td>' for place in columns)
        + "</tr>"
        for name, places in chosen.items()
    )
    selection = f", the {most} noisiest of {len(layers)} layers" if len(layers) > most else ""
    return (
        f"<h3>{escape(run.name)}, step {max(by_step):,}{selection}</h3>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Gauges of {escape(run.name)}"><table>'
        f'<thead><tr><th scope="col">layer</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


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

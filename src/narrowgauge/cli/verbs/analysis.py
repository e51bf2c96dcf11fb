"""`probe` and `sensitivity`: the effect of quantization on a model, measured without training."""

import argparse
import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from narrowgauge.analysis import (
    Cost,
    Probed,
    RecipeProbe,
    backward_costs,
    exact_backward_costs,
    forward_costs,
    in_order,
    open_probed,
    probe,
    probe_json,
    sensitivity_json,
    step_metric,
)
from narrowgauge.analysis.probe import USEFUL, Progress
from narrowgauge.files import write_whole
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import GEMM_PLACES, recipe
from narrowgauge.runs.run_directory import PROBE, SENSITIVITY
from narrowgauge.t_interval import Interval

_COLUMNS = {
    "loss_increase": ("loss +", ".4f", ""),
    "gradient_cosine": ("cosine", ".3f", ""),
    "gradient_bias": ("bias", "+.3f", ""),
    "effective_bits": ("bits", ".1f", "exact"),
    "averaging_slope": ("slope", ".2f", ""),
    "noise_ratio": ("g/noise", ".1f", "no noise"),
}
_WORST = 3  # parameters listed below the table for each recipe


def run_probe(options: argparse.Namespace) -> None:
    """Probe, print the table or JSON, and store it in the run directory for the report."""
    named = [recipe(name.strip()) for name in (options.recipes or "").split(",") if name.strip()]
    with progress(Console(stderr=options.json), "probe") as show:
        probed = open_subject(options)
        probes = probe(probed.subject, named or [probed.recipe], options.draws, show)
    found = probe_json(probes, **_facts(probed), draws=options.draws)
    _keep(options.run, PROBE, found)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print_table(probes, heading(options.run, probed))


def run_sensitivity(options: argparse.Namespace) -> None:
    """Find the cost of each layer and place, print the map or JSON, and store it."""
    cast = operand_cast(options.to)
    with progress(Console(stderr=options.json), "sensitivity") as show:
        probed = open_subject(options)
        metric = step_metric(probed.trained)
        forward = forward_costs(probed.subject, cast, show)
        backward = backward_costs(probed.subject, cast, metric, show)
        exact = exact_backward_costs(probed.subject, cast, metric, show) if options.exact else None
    found = sensitivity_json(forward, backward, exact, **_facts(probed), to=cast.name)
    _keep(options.run, SENSITIVITY, found)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    console = Console()
    console.print(
        f"{heading(options.run, probed)}, one place in {cast.name}", highlight=False, soft_wrap=True
    )
    console.print(_map(in_order(forward, exact or backward), {*found["worst"], *found["worst_backward"]}))
    for line in _COST_NOTES:
        console.print(line, style="dim", markup=False, highlight=False)
    for key, words in (("worst", "worst"), ("worst_backward", "worst backward")):
        console.print(f"{words}: {', '.join(found[key])}", markup=False, highlight=False, soft_wrap=True)
    if exact is not None:
        correlation = found["rank_correlation"]
        words = "none, all are equal" if correlation is None else f"{correlation:.3f}"
        console.print(f"rank correlation of estimated and measured: {words}", highlight=False)


def operand_cast(name: str) -> Cast:
    """The cast with this name, for an operand of a matmul.

    Raises:
        UserError: there is no such cast, or it is for state.
    """
    make_cast(name)  # without a place in its error message
    return recipe("fp32").with_places({"fprop.x": name}).casts["fprop.x"]


def open_subject(options: argparse.Namespace) -> Probed:
    """Open the model and text that the options of `add_subject` specify."""
    return open_probed(
        options.run,
        options.device,
        options.tokenizer,
        options.data,
        options.batches,
        options.batch_size,
        options.sequence_length,
    )


def _facts(probed: Probed) -> dict[str, int]:
    batches = probed.subject.batches
    return {
        "step": probed.trained.step,
        "batches": len(batches),
        "tokens": sum(batch.targets for batch in batches),
    }


def heading(run: Path, probed: Probed) -> str:
    """The heading of a result: the model, and the text it was measured on."""
    facts = _facts(probed)
    return f"{run} after step {facts['step']}, {facts['tokens']:,} tokens in {facts['batches']} batches"


def _keep(run: Path, name: str, found: dict[str, Any]) -> None:
    """Store a result in a run directory, for the report; models of other programs are left unchanged."""
    if (run / "config.toml").is_file():
        write_whole(run / name, json.dumps(found, indent=1) + "\n")


def _map(costs: Sequence[Cost], marked: Collection[str]) -> Table:
    """A table of layers x places; the worst are marked."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for place in GEMM_PLACES:
        table.add_column(place)
    by_name = {cost.name: cost.cost for cost in costs}
    for layer in dict.fromkeys(cost.layer for cost in costs):
        names = [f"{layer}.{place}" for place in GEMM_PLACES]
        table.add_row(layer, *(f"{by_name[n]:.1e}{'*' if n in marked else ''}" for n in names))
    return table


def _print_table(probes: list[RecipeProbe], first_line: str) -> None:
    console = Console()
    console.print(first_line, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    for title, *_ in _COLUMNS.values():
        table.add_column(title, justify="right")
    for p in probes:
        table.add_row(p.recipe, *(_cell(p.figures[name], *how) for name, (_, *how) in _COLUMNS.items()))
    console.print(table)
    for line in [*_NOTES, *_findings(probes)]:
        console.print(line, style="dim", markup=False, highlight=False)


_COST_NOTES = (
    "fprop: nats added to the loss; dgrad, wgrad: share lost of what an optimizer step removes from the loss",
    "attention and the residual stream stay wide; *: the four worst of each kind",
)
_NOTES = (
    "loss +: nats a token more than the same weights in fp32",
    "cosine, bias, bits: of the gradient, against a backward pass of the same numbers that rounds nothing",
    "slope: bits gained when draws are averaged; 0.5 is unbiased, 0 is only bias",
    "g/noise: norm of that gradient over the noise of the random bits; ±: 95 % interval over the batches",
)


def _findings(probes: list[RecipeProbe]) -> Iterator[str]:
    """Sentences on the meaning of the figures: useless gradients, and the largest errors."""
    for p in probes:
        if (high := p.figures["noise_ratio"].high) < USEFUL:
            yield (
                f"{p.recipe}: the gradient is under {high:.2f} times its quantization noise; below 1.73 "
                "further training gains nothing (arXiv 2505.19115)"
            )
        worst = sorted(p.layers, key=lambda layer: -layer.relative_error)[:_WORST]
        if worst and worst[0].relative_error > 0:
            names = ", ".join(f"{layer.parameter} ({layer.relative_error:.3f})" for layer in worst)
            yield f"{p.recipe}: largest relative errors of gradients: {names}"


def _cell(value: Interval, digits: str, exact: str) -> str:
    """A mean and half its interval; `exact` replaces infinity."""
    if not math.isfinite(value.mean):
        return (exact if value.mean > 0 else "") or "not finite"
    half = "" if math.isnan(value.low) else f"±{value.high - value.mean:{digits.removeprefix('+')}}"
    return f"{value.mean:{digits}}{half}"


@contextmanager
def progress(console: Console, name: str) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a line when a recipe begins."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(compact=True))
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def show(recipe: str, done: int, total: int) -> None:
            if recipe not in tasks:
                tasks[recipe] = bars.add_task(f"{name} {recipe}", total=total)
                if not console.is_terminal:
                    console.print(f"{name} {recipe} ...", highlight=False, markup=False)
            bars.update(tasks[recipe], completed=done)

        yield show

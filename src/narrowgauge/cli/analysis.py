"""`probe`: what recipes do to a model, measured without training."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from narrowgauge.analysis import RecipeProbe, open_probed, probe, probe_json
from narrowgauge.analysis.probe import USEFUL, Progress
from narrowgauge.cli.options import positive_integer
from narrowgauge.files import write_whole
from narrowgauge.recipes import recipe
from narrowgauge.t_interval import Interval
from narrowgauge.training.run_directory import PROBE

HELP = "what recipes do to a model's loss and gradient, without training"
_COLUMNS = {
    "loss_increase": ("loss +", ".5f", ""),
    "gradient_cosine": ("cosine", ".5f", ""),
    "gradient_bias": ("bias", "+.5f", ""),
    "effective_bits": ("bits", ".2f", "exact"),
    "averaging_slope": ("slope", ".2f", ""),
    "noise_ratio": ("g/noise", ".1f", "no noise"),
}
_WORST = 3  # parameters that are named under the table, for each recipe


def add_probe_options(p: argparse.ArgumentParser) -> None:
    """Add the options of `probe`."""
    p.add_argument("run", metavar="RUN", type=Path, help="a run, a Hugging Face folder or an llm.c model")
    p.add_argument("--recipes", metavar="A,B,...", help="shipped recipes or .toml files (the run's own)")
    p.add_argument("--data", metavar="SOURCE", help="other text than the run's")
    p.add_argument("--batches", type=positive_integer, default=8, metavar="N", help="of held-out text (8)")
    p.add_argument("--batch-size", type=positive_integer, metavar="N", help="sequences (the run's)")
    p.add_argument("--sequence-length", type=positive_integer, metavar="N", help="tokens (the run's)")
    p.add_argument(
        "--draws", type=positive_integer, default=8, metavar="N", help="of random bits, for each batch (8)"
    )
    p.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (that of the model)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_probe(options: argparse.Namespace) -> None:
    """Probe, print the table or JSON, and keep it in the run directory for the report."""
    named = [recipe(name.strip()) for name in (options.recipes or "").split(",") if name.strip()]
    errors = Console(stderr=True)
    with _progress(errors, "probe") as show:
        probed = open_probed(
            options.run,
            options.device,
            options.tokenizer,
            options.data,
            options.batches,
            options.batch_size,
            options.sequence_length,
        )
        probes = probe(probed.subject, named or [probed.recipe], options.draws, show)
    facts = {
        "step": probed.trained.step,
        "batches": len(probed.subject.batches),
        "tokens": sum(batch.targets for batch in probed.subject.batches),
        "draws": options.draws,
    }
    text = json.dumps(probe_json(probes, **facts), indent=1)
    if (options.run / "config.toml").is_file():  # a run directory
        write_whole(options.run / PROBE, text + "\n")
    if options.json:
        print(text)
        return
    tokens = f"{facts['tokens']:,} tokens in {facts['batches']} batches"
    _print_table(probes, f"{options.run} after step {facts['step']}, {tokens}; figures with 95 % intervals")


def _print_table(probes: list[RecipeProbe], heading: str) -> None:
    console = Console()
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    table = Table("recipe", box=None, header_style="bold")
    for title, *_ in _COLUMNS.values():
        table.add_column(title, justify="right")
    for p in probes:
        table.add_row(p.recipe, *(_cell(p.figures[name], *how) for name, (_, *how) in _COLUMNS.items()))
    console.print(table)
    for line in [*_NOTES, *_findings(probes)]:
        console.print(line, style="dim", markup=False, highlight=False)


_NOTES = (
    "loss +: nats a token more than the same weights in fp32",
    "cosine, bias, bits: of the gradient, against that of the same forward pass with a backward pass in fp32",
    "slope: bits gained when draws are averaged; 0.5 is unbiased, 0 is nothing but bias",
    "g/noise: norm of that gradient over the noise of the random bits",
)


def _findings(probes: list[RecipeProbe]) -> Iterator[str]:
    """Sentences on what the figures mean: useless noise, and the parameters that are hurt most."""
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
    """A mean and half its interval; `exact` is the word for infinity."""
    if not math.isfinite(value.mean):
        return exact if value.mean > 0 else "not finite"
    half = "" if math.isnan(value.low) else f"±{value.high - value.mean:{digits.removeprefix('+')}}"
    return f"{value.mean:{digits}}{half}"


@contextmanager
def _progress(console: Console, name: str) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line when a recipe begins."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(compact=True))
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def show(recipe: str, done: int, total: int) -> None:
            if recipe not in tasks:
                tasks[recipe] = bars.add_task(f"{name} {recipe}", total=total)
                if not console.is_terminal:
                    print(f"{name} {recipe} ...", file=sys.stderr, flush=True)
            bars.update(tasks[recipe], completed=done)

        yield show

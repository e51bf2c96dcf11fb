"""`probe`: what recipes do to a trained model's loss and gradient, without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from narrowgauge.recipes import RecipeLike, recipe, recipe_list
from narrowgauge.system.errors import checked
from narrowgauge.system.result import Result, Row
from narrowgauge.system.t_interval import Interval
from narrowgauge.trainer import analysis  # each name is imported when it is used, and with it torch
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.chart import bars
from narrowgauge.trainer.laboratory.subject import facts, heading, keep

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = {
    "loss_increase": ("loss +", ".4f", ""),
    "gradient_cosine": ("cosine", ".3f", ""),
    "gradient_bias": ("bias", "+.3f", ""),
    "effective_bits": ("bits", ".1f", "exact"),
    "averaging_slope": ("slope", ".2f", ""),
    "noise_ratio": ("g/noise", ".1f", "no noise"),
}
_WORST = 3  # parameters listed below the table for each recipe
_NOTES = (
    "loss +: nats a token more than the same weights in fp32",
    "cosine, bias, bits: of the gradient, against a backward pass of the same numbers that rounds nothing",
    "slope: bits gained when draws are averaged; 0.5 is unbiased, 0 is only bias",
    "g/noise: norm of that gradient over the noise of the random bits; ±: 95 % interval over the batches",
)


@dataclass(eq=False)
class ProbeResult(Result):
    """The probes of some recipes on one model.

    Attributes:
        probes: One for each recipe, in their order.
        heading: The model, and the text it was measured on.
        found: All of it as JSON values.
    """

    probes: list[analysis.RecipeProbe]
    heading: str
    found: dict[str, Any]

    def __repr__(self) -> str:
        shown = (f"{p.recipe} {p.figures['loss_increase'].mean:+.4f} nats" for p in self.probes)
        return f"<ProbeResult: {', '.join(shown)}>"

    def rows(self) -> list[Row]:
        """A row for each recipe, with the mean and the ends of the interval of each figure."""
        rows = []
        for p in self.probes:
            row: Row = {"recipe": p.recipe}
            for name, value in p.figures.items():
                row |= {f"{name}_{end}": x for end, x in value.as_json().items()}
            rows.append(row)
        return rows

    def as_json(self) -> dict[str, Any]:
        """The figures by recipe, with the gradient of each parameter."""
        return self.found

    def show(self, console: Console) -> None:
        """Print the table, what its columns mean, and what stands out."""
        from rich.table import Table

        console.print(self.heading, markup=False, highlight=False, soft_wrap=True)
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("recipe", no_wrap=True)
        for title, *_ in _COLUMNS.values():
            table.add_column(title, justify="right")
        for p in self.probes:
            table.add_row(p.recipe, *(_cell(p.figures[name], *how) for name, (_, *how) in _COLUMNS.items()))
        console.print(table)
        for line in [*_NOTES, *_findings(self.probes)]:
            console.print(line, style="dim", markup=False, highlight=False)

    def plot(self) -> str:
        """The increase of the loss under each recipe, with its interval."""
        found = {p.recipe: p.figures["loss_increase"] for p in self.probes}
        values = {name: (x.mean, x.low, x.high) for name, x in found.items()}
        return bars(values, "increase of the loss, nats a token", "+.4f")


@checked
def probe(
    run: given.Run | str,
    recipes: Annotated[RecipeLike | Sequence[RecipeLike], given.NAMES] = (),
    draws: given.Count = 8,
    *,
    show: given.Progress | None = None,
    **text: Unpack[given.Text],
) -> ProbeResult:
    """Measure the effect of recipes on loss, gradient and its bias, without training.

        narrowgauge probe runs/mine --recipes mxfp8,nvfp4

    Args:
        run: A run directory, a Hugging Face folder, or an llm.c model.
        recipes: Recipes by name or file, in Python also as dictionaries or `Recipe`s (the run's own).
        draws: Gradients of each batch under a recipe with random bits.
        show: Called with a recipe's name, the batches done and their number.
        text: The text and the device: data, batches, batch_size, sequence_length, tokenizer, device.

    Returns:
        The figures, which the run directory keeps for its report as well.

    Raises:
        UserError: There is no such run, text or recipe, or too little text for two batches.
    """
    from narrowgauge.trainer.runs.run_directory import PROBE

    path, named = Path(run), [recipe(one) for one in recipe_list(recipes)]
    probed = analysis.open_probed(run, **text)
    probes = analysis.probe(probed.subject, named or [probed.recipe], draws, show)
    found = analysis.probe_json(probes, **facts(probed), draws=draws)
    keep(path, PROBE, found)
    return ProbeResult(probes, heading(path, probed), found)


def _findings(probes: Sequence[analysis.RecipeProbe]) -> Iterator[str]:
    """Sentences on the meaning of the figures: useless gradients, and the largest errors."""
    from narrowgauge.trainer.analysis.probe import USEFUL

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

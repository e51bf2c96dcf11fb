"""`sensitivity`: what narrowing each layer and place alone would cost a trained model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from narrowgauge.formats import Format
from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.trainer import analysis  # each name is imported when it is used, and with it torch
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.chart import heat
from narrowgauge.trainer.laboratory.subject import FEW, facts, heading, keep, operand_cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNITS = (
    "fprop: nats added to the loss; dgrad, wgrad: share lost of what an optimizer step removes from the loss"
)
_NOTE = "attention and the residual stream stay wide; *: the four worst of each kind"


class Sensitivity(Result):
    """The cost of each layer and place, narrowed alone.

    Attributes:
        costs: In the order of the model's layers and places.
        worst: The names of the worst places of the forward pass.
        worst_backward: The names of the worst places of the backward pass.
        cast: The name of the cast that each place was narrowed to.
    """

    def __init__(
        self, costs: Sequence[analysis.Cost], cast: str, heading: str, found: Mapping[str, Any]
    ) -> None:
        """Keep the costs, and their values for programs."""
        self.costs, self.cast, self.heading, self._found = list(costs), cast, heading, dict(found)
        self.worst: list[str] = list(found["worst"])
        self.worst_backward: list[str] = list(found["worst_backward"])

    def __repr__(self) -> str:
        return f"<Sensitivity to {self.cast}: worst {', '.join(self.worst[:2])}>"

    def rows(self) -> list[Row]:
        """A row for each layer and place: cost, its interval, and its unit."""
        return [dict(line) for line in self._found["layers"]]

    def as_json(self) -> dict[str, Any]:
        """The costs, and the worst places."""
        return self._found

    def show(self, console: Console) -> None:
        """Print the map of layers and places, and the worst of them."""
        line = f"{self.heading}, one place in {self.cast}"
        console.print(line, highlight=False, soft_wrap=True)
        console.print(_map(self.costs, {*self.worst, *self.worst_backward}))
        for note in (self._found.get("forks", _UNITS), _NOTE):
            console.print(note, style="dim", markup=False, highlight=False)
        for words, names in (("worst", self.worst), ("worst backward", self.worst_backward)):
            console.print(f"{words}: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
        for key, which in (("rank_correlation_forward", " forward"), ("rank_correlation", "")):
            if key in self._found:
                correlation = self._found[key]
                text = "none, all are equal" if correlation is None else f"{correlation:.3f}"
                console.print(f"rank correlation of estimated and measured{which}: {text}", highlight=False)

    def plot(self) -> str:
        """The map of layers and places."""
        layers = list(dict.fromkeys(cost.layer for cost in self.costs))
        values = {(cost.layer, cost.place): cost.cost for cost in self.costs}
        return heat(layers, GEMM_PLACES, values, f"cost of one place in {self.cast}", ".1e")


@checked
def sensitivity(
    run: given.Run | str,
    to: Annotated[str | Format | Cast | dict[str, Any], given.CAST],
    exact: bool = False,
    *,
    fork_steps: given.Count | None = None,
    fork_seeds: given.Count = 3,
    show: given.Progress | None = None,
    **text: Unpack[given.Text],
) -> Sensitivity:
    """Measure the cost of low precision in each layer and place separately.

        narrowgauge sensitivity runs/mine --to mxfp4

    Args:
        run: A run directory, a Hugging Face folder, or an llm.c model.
        to: The cast to narrow a place to, such as mxfp4.
        exact: Measure places of the backward pass as well, each with separate passes.
        fork_steps: Measure by training this many steps from the checkpoint, with and without a narrow place.
        fork_seeds: Repeats of each fork, in another order of the text.
        show: Called with a name, what is done and how much there is.
        text: The text and the device: data, batches, batch_size, sequence_length, tokenizer, device.

    Returns:
        The costs, which the run directory keeps for its report as well.

    Raises:
        UserError: The run, the text or the cast does not exist; the cast is for state; both `exact` and
            `fork_steps` are given; or `fork_steps` is given for a model of another program.
    """
    from narrowgauge.trainer.runs.run_directory import SENSITIVITY

    if exact and fork_steps is not None:
        raise UserError("exact and fork_steps are two ways to measure the same places; choose one")
    forks = None if fork_steps is None else analysis.Forks(fork_steps, fork_seeds)
    cast = operand_cast(to)
    probed = analysis.open_probed(run, **(FEW | text))
    metric = analysis.step_metric(probed.trained)
    forward = analysis.forward_costs(probed.subject, cast, show)
    backward = analysis.backward_costs(probed.subject, cast, metric, show)
    measured, about = [], {}
    if exact:
        measured = analysis.exact_backward_costs(probed.subject, cast, metric, show)
    if forks:
        measured = _forked(forks, probed, cast, show)
        about["forks"] = _words(forks, measured)
    found = analysis.sensitivity_json(forward, backward, measured, **facts(probed), to=cast.name, **about)
    keep(Path(run), SENSITIVITY, found)
    costs = analysis.in_order(forward, backward, measured)
    return Sensitivity(costs, cast.name, heading(Path(run), probed), found)


def _forked(
    forks: analysis.Forks, probed: analysis.Probed, cast: Cast, show: given.Progress | None
) -> list[analysis.Cost]:
    """The cost of each place by forks; the deviation of a gap is pooled over places (`verdict.rule`)."""
    from narrowgauge.trainer.report.verdict.rule import judge

    recipe = probed.trained.config.spec.recipe
    changes = {
        (layer, place): analysis.only_in(recipe, layer, {place: cast})
        for layer in probed.layers
        for place in GEMM_PLACES
    }
    gaps = forks.gaps(probed, changes, show)
    costs = []
    for key, judged in judge(gaps, family=()).items():
        half = math.nan if judged.half_width is None else judged.half_width
        costs.append(analysis.Cost(*key, judged.mean, judged.mean - half, judged.mean + half, is_forked=True))
    return costs


def _words(forks: analysis.Forks, costs: Sequence[analysis.Cost]) -> str:
    """A sentence about what forks measured, and what they can see."""
    text = f"nats at the end of {forks.steps} steps with the place narrow, mean of {forks.seeds} forks"
    if forks.seeds < 2:
        return f"{text}; a single seed gives no interval"
    half = statistics.median(cost.high - cost.cost for cost in costs)
    seen = sum(cost.low > 0 for cost in costs)
    return f"{text}, each +- {half:.1e} (median, 95 %): {seen} of {len(costs)} cost something for certain"


def _map(costs: Sequence[analysis.Cost], marked: Collection[str]) -> Table:
    """A table of layers x places; the worst are marked."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for place in GEMM_PLACES:
        table.add_column(place)
    by_name = {cost.name: cost.cost for cost in costs}
    for layer in dict.fromkeys(cost.layer for cost in costs):
        names = [f"{layer}.{place}" for place in GEMM_PLACES]
        table.add_row(layer, *(f"{by_name[n]:.1e}{'*' if n in marked else ''}" for n in names))
    return table

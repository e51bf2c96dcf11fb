"""Compares recipes and settings by training them, from Python or from the command line."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.recipes import RecipeLike, recipe_list
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.trainer.distributed import world_from
from narrowgauge.trainer.experiment.arms import choose_arms, require_order, take_arms, take_experiment
from narrowgauge.trainer.experiment.design import Experiment, make_experiment
from narrowgauge.trainer.experiment.gate import Gate, GateResult, gate_results, parse_gate
from narrowgauge.trainer.experiment.grid import RECIPE, Seeds, Variant
from narrowgauge.trainer.experiment.jobs import state_of
from narrowgauge.trainer.experiment.run import print_plan, recorded_runs, run_experiment
from narrowgauge.trainer.laboratory.chart import curves
from narrowgauge.trainer.laboratory.settings import Section, own_functions, recipe_name, short_name, values_of
from narrowgauge.trainer.laboratory.watch import watched_by_another
from narrowgauge.trainer.report import Run, Verdict, print_comparison, verdicts
from narrowgauge.trainer.runs.loop.check_data import check_vocabulary
from narrowgauge.trainer.runs.monitor.provenance import command_line
from narrowgauge.trainer.training import make_config


class Comparison(Result):
    """The runs of a comparison, and the verdict on each variant.

    Attributes:
        path: The directory of the runs.
        report: The page of the comparison.
        runs: The runs at the highest rung, the reference first; [] if another machine trained it.
        verdicts: One for each variant, the reference first.
        gates: The decision on each variant, where a gate was given.
        has_failed: Whether a run failed, or a variant does not pass the gate.
    """

    def __init__(self, path: Path, runs: Sequence[Run], gate: Gate | None, code: int) -> None:
        """Judge the runs."""
        self.path, self.report, self.runs = path, path / "report.html", list(runs)
        self.verdicts: list[Verdict] = verdicts(self.runs) if runs else []
        self.gates: list[GateResult] = [] if gate is None else gate_results(self.runs, gate)
        self.has_failed = bool(code)

    @property
    def passes(self) -> bool:
        """Whether every run succeeded and every variant passes the gate, if there is one."""
        return not self.has_failed

    def __repr__(self) -> str:
        shown = (f"{v.name} {v.conclusion}" for v in self.verdicts if not v.is_reference)
        return f"<Comparison {self.path}: {', '.join(shown)}>"

    def rows(self) -> list[Row]:
        """A row for each variant: loss, gap to the reference in percent with its interval, verdict, cost."""
        words = {gate.name: gate.word for gate in self.gates}
        rows = []
        for v in self.verdicts:
            ends: tuple[float | None, float | None] = (None, None)
            if v.gap is not None and v.half_width is not None:
                ends = (v.gap - v.half_width, v.gap + v.half_width)
            rows.append(
                {
                    "variant": v.name,
                    "seeds": len(v.seeds),
                    "loss": v.loss,
                    "gap_percent": v.gap,
                    "gap_low": ends[0],
                    "gap_high": ends[1],
                    "verdict": v.conclusion,
                    "gate": words.get(v.name),
                    "tokens_per_s": v.tokens_per_s,
                    "memory_bytes": v.memory_bytes,
                    "arithmetic": v.arithmetic,
                }
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """The verdicts, and where the runs are."""
        return {"path": str(self.path), "passes": self.passes, "variants": self.rows()}

    def show(self, console: Console) -> None:
        """Print the table and the sentences of the comparison, if its runs are here."""
        if self.runs:
            print_comparison(self.runs, console)

    def plot(self) -> str:
        """The losses of all runs over their tokens: of the validations, if there are any."""
        series = {}
        for run in self.runs:
            tokens = {step.step: step.tokens for step in run.steps}
            points = [(tokens[at.step], at.val_loss) for at in run.validation if at.step in tokens]
            series[run.name] = points if len(points) > 1 else [(s.tokens, s.loss) for s in run.steps]
        return curves(series, self.path.name, "tokens", "loss, nats a token")


@checked
def compare(
    recipes: RecipeLike | Sequence[RecipeLike] = (),
    seeds: Seeds = None,
    out: str | Path | None = None,
    *,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    rungs: Sequence[int] = (),
    jobs: int = 0,
    gate: str | float | None = None,
    expected: bool = False,
    quiet: bool = False,
    **sections: Section,
) -> Comparison:
    """Train the same model on the same tokens under several recipes, and judge them, as the verb does.

        ng.compare(recipes=["bf16", "mxfp8"], seeds=2, out="runs/compare", training={"steps": 200})

    Args:
        recipes: Names, paths, dictionaries or `Recipe`s; the first is the reference.
        seeds: The number of seeds of each, or which; None for the seed of the configuration.
        out: The directory of the runs; None for one named after the model. Finished runs there are reused.
        variants: Further runs with other values of some keys: `{"hot": {"optimizer.lr": 4e-3}}`.
        rungs: Steps after which each is measured, with its learning rate decayed.
        jobs: Runs side by side; 0 for one after the other.
        gate: The largest acceptable gap: nats, or text such as "0.25%".
        expected: Whether each gap is compared with its forecast.
        quiet: Whether to print nothing.
        sections: Sections of the configuration as dictionaries, as for `train`.

    Returns:
        The verdicts; `report` is a page on disk.

    Raises:
        UserError: A value is wrong, or the directory holds other runs.
        ComparisonFailed: A run was stopped or killed; the same call continues.
    """
    values = values_of(sections)
    kind = "ladder" if rungs or jobs else "compare"
    path = Path(out or f"runs/{kind}-{values.get('model', {}).get('name', 'debug')}")
    named = []
    for one in recipe_list(recipes):
        name = short_name(one)
        named.append(Variant(name, {RECIPE: recipe_name(one, path / f"{name}.recipe.toml")}))
    others = [Variant(name, keys) for name, keys in (variants or {}).items()]
    experiment = experiment_of(values, named, others, seeds, rungs=rungs, jobs=jobs)
    limit = None if gate is None else parse_gate(str(gate))
    return run_comparison(experiment, path, Console(quiet=quiet), limit, expected)


def experiment_of(
    values: Mapping[str, Any],
    recipes: Sequence[Variant],
    variants: Sequence[Variant],
    seeds: Seeds = None,
    chosen: Sequence[str] = (),
    rungs: Sequence[Any] = (),
    jobs: int = 0,
) -> Experiment:
    """The experiment of some values, which may have [arms] and [experiment], and of more variants.

    Raises:
        UserError: something in them is wrong.
    """
    values, arms = take_arms(values)
    values, table = take_experiment(values)
    require_order(table, arms)
    everything = [*recipes, *choose_arms(arms, chosen), *variants]
    seeds = table.get("seeds") if seeds is None else seeds
    table |= ({"rungs": list(rungs)} if rungs else {}) | ({"jobs": jobs} if jobs else {})
    if table:
        table.setdefault("rungs", [make_config(values).training.steps])
    return make_experiment(values, everything, seeds, table)


def run_comparison(
    experiment: Experiment,
    out: Path,
    console: Console,
    gate: Gate | None = None,
    expected: bool = False,
    is_watched: bool = False,
) -> Comparison:
    """Train what is left of an experiment, print what was found, write the page, and judge.

    With `is_watched` another process shows the experiment on a live page meanwhile.

    Raises:
        UserError: The text has other tokens than the model, a launcher's processes cannot share the work, or
            a cast is a function of this process, which the processes of the runs do not have.
        ComparisonFailed: A run left no result; the same call continues.
    """
    rank = _require_ready(experiment, out)
    shown = Console(quiet=True) if rank else console
    say = partial(shown.print, markup=False, highlight=False, soft_wrap=True)
    with watched_by_another(out, say) if is_watched and not rank else nullcontext():
        code = run_experiment(experiment, out, shown, rank, gate, command_line(), expected)
    return Comparison(out, recorded_runs(experiment, out), gate, code)


def plan_comparison(experiment: Experiment, out: Path, console: Console) -> None:
    """Print which gap the experiment will detect and what is left to train; do not train."""
    rank = _require_ready(experiment, out)
    print_plan(experiment, out, Console(quiet=True) if rank else console)


def _require_ready(experiment: Experiment, out: Path) -> int:
    """Refuse, before the first run starts, what would fail in a later one; returns this process's rank."""
    world = world_from(os.environ, 0)
    for run in experiment.runs:
        check_vocabulary(run.config)
        if (names := list(own_functions(run.config))) and state_of(out / run.name) == "open":
            raise UserError(
                f"{run.name}: cast {names[0]!r} is a function of this process, and runs train in others; "
                f"train it here first, by narrowgauge.train(..., out={str(out / run.name)!r})"
            )
    if experiment.is_measured and world.size > 1:
        raise UserError("--rungs and --jobs start processes themselves; start compare without a launcher")
    return world.rank

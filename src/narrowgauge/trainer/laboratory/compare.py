"""Compares recipes and settings by training them, from Python or from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from narrowgauge.recipes import RecipeLike, recipe, recipe_list
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.trainer import distributed, report  # each name is imported when it is used
from narrowgauge.trainer.experiment.design import RECIPE, Seeds, Variant, parse_variant
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.arguments import Form, Section, recipe_name, values_of
from narrowgauge.trainer.laboratory.chart import curves

if TYPE_CHECKING:
    from narrowgauge.trainer.experiment.design import Experiment
    from narrowgauge.trainer.experiment.gate import GateResult

Variants = Mapping[str, Mapping[str, Any]] | Sequence[Variant] | None
_VARIANT = Form(
    "NAME:KEY=VALUE,...",
    lambda text: (parse_variant(text, given.key_names()),),
    is_list=True,
    flag="--variant",
)


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

    def __init__(
        self, path: Path, runs: Sequence[report.Run], gates: Sequence[GateResult], has_failed: bool
    ) -> None:
        """Judge the runs."""
        self.path, self.report, self.runs = path, path / "report.html", list(runs)
        self.verdicts: list[report.Verdict] = report.verdicts(self.runs) if runs else []
        self.gates, self.has_failed = list(gates), has_failed

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
        return [
            {
                "variant": v.name,
                "seeds": len(v.runs),
                "loss": v.loss,
                "gap_percent": v.gap,
                "gap_low": None if v.half_width is None else v.at_once.low,
                "gap_high": None if v.half_width is None else v.at_once.high,
                "verdict": v.conclusion,
                "gate": words.get(v.name),
                "tokens_per_s": v.tokens_per_s,
                "memory_bytes": v.memory_bytes,
                "arithmetic": v.arithmetic,
            }
            for v in self.verdicts
        ]

    def as_json(self) -> dict[str, Any]:
        """The verdicts, and where the runs are."""
        return {"path": str(self.path), "passes": self.passes, "variants": self.rows()}

    def show(self, console: given.Console) -> None:
        """Print the table and the sentences of the comparison, if its runs are here."""
        if self.runs:
            report.print_comparison(self.runs, console)

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
    recipes: Annotated[RecipeLike | Sequence[RecipeLike], given.NAMES] = (),
    seeds: Annotated[Seeds, Form("N|A,B,C", given.parse_seeds)] = None,
    out: str | Path | None = None,
    *,
    variants: Annotated[Variants, _VARIANT] = None,
    gate: Annotated[str | float | None, Form("GAP")] = None,
    expected: Annotated[bool, Form()] = False,
    rungs: Annotated[Sequence[int], Form("STEPS,...", given.numbers, is_list=True)] = (),
    arms: Annotated[Sequence[str], given.NAMES, Form("A,B")] = (),
    jobs: given.Count = 0,
    ray: Annotated[str, Form("ADDRESS", bare="auto")] = "",
    dry_run: Annotated[bool, Form()] = False,
    watch: Annotated[bool, Form()] = False,
    quiet: bool = False,
    line: given.Line | None = None,
    console: given.Console = None,
    **sections: Section,
) -> Comparison:
    """Train a model under several recipes, settings and seeds, and compare the losses.

        ng.compare(recipes=["bf16", "mxfp8"], seeds=2, out="runs/compare", training={"steps": 200})
        ng.compare(variants={"cold": {"optimizer.lr": 1e-3}, "hot": {"optimizer.lr": 4e-3}})

        narrowgauge compare --recipes bf16,fp8,mxfp4 --seeds 3 --steps 200
        narrowgauge compare --variant wide:recipe=bf16 --variant hot:recipe=fp8,lr=4e-3

    Args:
        recipes: Recipes; the first is the reference.
        seeds: Number of seeds per variant, or the seeds (that of --seed).
        out: The directory of the runs; None for one named after the model. Finished runs there are reused.
        variants: Add a variant: a name and values of any keys; repeatable.
        gate: Largest accepted gap, in nats (0.01) or percent (0.25%); exit code 1 if a variant exceeds it.
        expected: Compare each gap with its forecast, to find faults.
        rungs: Lengths at which to compare; each branches off one trunk and decays the learning rate.
        arms: Run only these arms of the file's [arms] table.
        jobs: Number of parallel runs (1).
        ray: Train on a cluster of Ray, each run a task (auto: the cluster that this machine belongs to).
        dry_run: Print runs, tokens and hours, and exit.
        watch: Show a live page meanwhile (narrowgauge watch).
        quiet: Whether to print nothing.
        line: A command line in place of the sections and `out`.
        console: Receives the progress; None for the terminal.
        sections: Sections of the configuration as dictionaries, as for `train`.

    Returns:
        The verdicts; `report` is a page on disk.

    Raises:
        UserError: A value is wrong, or the directory holds other runs.
        ComparisonFailed: A run was stopped or killed; the same call continues.
    """
    from rich.console import Console

    from narrowgauge.trainer.experiment.gate import parse_gate
    from narrowgauge.trainer.experiment.run import print_plan, run_experiment
    from narrowgauge.trainer.laboratory.watch import watched_by_another
    from narrowgauge.trainer.runs.loop.run_context import command_line

    limit = None if gate is None else parse_gate(str(gate))
    values, kind = values_of(line, sections), "ladder" if rungs or jobs else "compare"
    if line is None:
        out = out or f"runs/{kind}-{values.get('model', {}).get('name', 'debug')}"
    experiment = experiment_of(values, recipes, variants, seeds, arms, rungs, jobs, ray, Path(out or ""))
    kind = "ladder" if experiment.is_measured else "compare"
    path = Path(out or f"runs/{kind}-{experiment.trunks[0].config.model.name}")
    rank = _require_ready(experiment, path)
    console = Console(quiet=True) if rank else console or Console(quiet=quiet)
    if dry_run:
        print_plan(experiment, path, console)
        return Comparison(path, [], [], has_failed=False)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with watched_by_another(path, say) if watch and not rank else nullcontext():
        found = run_experiment(experiment, path, console, rank, limit, command_line(), expected)
    return Comparison(path, *found)


def experiment_of(
    values: given.Values,
    recipes: RecipeLike | Sequence[RecipeLike],
    variants: Variants,
    seeds: Seeds,
    arms: Sequence[str],
    rungs: Sequence[int],
    jobs: int,
    ray: str = "",
    folder: Path = Path(),
) -> Experiment:
    """The experiment of the arguments of `compare`; a recipe that is an object gets a file in `folder`."""
    from narrowgauge.trainer.experiment.design import make_experiment

    named = []
    for one in recipe_list(recipes):
        name = Path(one).stem if isinstance(one, str | Path) else recipe(one).name
        named.append((name, {RECIPE: recipe_name(one, folder / f"{name}.recipe.toml")}))
    others = list(variants.items() if isinstance(variants, Mapping) else variants or ())
    made = make_experiment(values, named, others, seeds, arms, rungs, jobs)
    return made.model_copy(update={"design": made.design.model_copy(update={"ray": ray})}) if ray else made


def _require_ready(experiment: Experiment, out: Path) -> int:
    """Refuse, before the first run starts, what would fail in a later one; returns this process's rank.

    The text may have other tokens than the model, a launcher's processes cannot share the work of some
    experiments, and a cast may be a function of this process, which the processes of the runs do not have.
    """
    from narrowgauge.trainer.experiment.jobs import state_of
    from narrowgauge.trainer.runs.loop.resolve import check_vocabulary

    world = distributed.world_from(os.environ, 0)
    for run in experiment.runs:
        check_vocabulary(run.config)
        own = run.config.spec.recipe
        every = [
            cast for casts in (own.casts, *(rule.casts for rule in own.rules)) for cast in casts.values()
        ]
        names = [cast.function for cast in every if cast.function]
        if names and state_of(out / run.name) == "open":
            raise UserError(
                f"{run.name}: cast {names[0]!r} is a function of this process, and runs train in others; "
                f"train it here first, by narrowgauge.train(..., out={str(out / run.name)!r})"
            )
    if (experiment.is_measured or experiment.design.ray) and world.size > 1:
        raise UserError(
            "--rungs, --jobs and --ray start processes themselves; start compare without a launcher"
        )
    return world.rank

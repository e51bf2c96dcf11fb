"""`compare`: trains recipes, variants, arms and seeds, and reports verdicts and a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from narrowgauge.trainer.cli.line import config_values, key_names
from narrowgauge.trainer.laboratory.arguments import Console, Count, Form, Line, Names, Seeds, numbers

if TYPE_CHECKING:
    from narrowgauge.trainer.experiment.design import Experiment


def compare(
    line: Line,
    *,
    recipes: Annotated[Names, "recipes; the first is the reference"] = (),
    variant: Annotated[
        tuple[str, ...],
        Form("NAME:KEY=VALUE,...", lambda text: (text,), is_list=True),
        "add a variant: a name and values of any keys; repeatable",
    ] = (),
    seeds: Annotated[Seeds | None, "number of seeds per variant, or the seeds (that of --seed)"] = None,
    gate: Annotated[
        str | None,
        Form("GAP"),
        "largest accepted gap, in nats (0.01) or percent (0.25%); exit code 1 if a variant exceeds it",
    ] = None,
    expected: Annotated[bool, "compare each gap with its forecast, to find faults"] = False,
    rungs: Annotated[
        tuple[int, ...],
        Form("STEPS,...", numbers, is_list=True),
        "lengths at which to compare; each branches off one trunk and decays the learning rate",
    ] = (),
    arms: Annotated[Names, Form("A,B"), "run only these arms of the file's [arms] table"] = (),
    jobs: Annotated[Count | None, "number of parallel runs (1)"] = None,
    dry_run: Annotated[bool, "print runs, tokens and hours, and exit"] = False,
    watch: Annotated[bool, "show a live page meanwhile (narrowgauge watch)"] = False,
    console: Console,
) -> int:
    """Train a model under several recipes, settings and seeds, and compare the losses.

    narrowgauge compare --recipes bf16,fp8,mxfp4 --seeds 3 --steps 200
    narrowgauge compare --variant wide:recipe=bf16 --variant hot:recipe=fp8,lr=4e-3
    """
    from narrowgauge.trainer.experiment.gate import parse_gate
    from narrowgauge.trainer.laboratory.compare import plan_comparison, run_comparison

    limit = None if gate is None else parse_gate(gate)
    experiment = read_plan(line)
    kind = "ladder" if experiment.is_measured else "compare"
    out = line.out or Path("runs") / f"{kind}-{experiment.trunks[0].config.model.name}"
    if dry_run:
        plan_comparison(experiment, out, console)
        return 0
    return int(run_comparison(experiment, out, console, limit, expected, is_watched=watch).has_failed)


def read_plan(line: Line) -> "Experiment":
    """The experiment that the options and the file specify.

    Raises:
        UserError: something in them is wrong.
    """
    from narrowgauge.trainer.experiment.grid import parse_variant, recipe_variants
    from narrowgauge.trainer.laboratory.compare import experiment_of

    names = key_names()
    return experiment_of(
        config_values(line),
        recipe_variants(line.recipes),
        [parse_variant(text, names) for text in line.variant],
        line.seeds,
        line.arms,
        line.rungs,
        line.jobs or 0,
    )

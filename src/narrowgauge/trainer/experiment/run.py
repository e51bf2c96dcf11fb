"""Trains the runs of an experiment, or continues them, and reports the results.

A run that is done or has diverged is a result and is not trained again; any other is started or continued, so
the same command line continues an experiment after any stop.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.trainer.experiment.design import Experiment
from narrowgauge.trainer.experiment.dry_run import arm_speeds, plan_lines
from narrowgauge.trainer.experiment.engine import Engine, environment_of
from narrowgauge.trainer.experiment.findings import judged, page_of, sight
from narrowgauge.trainer.experiment.gate import Gate, gate_results
from narrowgauge.trainer.experiment.grid import ArmRun
from narrowgauge.trainer.experiment.jobs import (
    Job,
    collect_rows,
    is_complete,
    next_job,
    remaining,
    remove_checkpoints,
    require_same,
    state_of,
)
from narrowgauge.trainer.experiment.probe import probe_arms
from narrowgauge.trainer.experiment.progress import ProgressLine
from narrowgauge.trainer.models import count_block_weights
from narrowgauge.trainer.report import print_comparison
from narrowgauge.trainer.report.page.page import write_page
from narrowgauge.trainer.report.page.sections import expected_section
from narrowgauge.trainer.report.page.subject import Subject, compared, read_begun, runs_of
from narrowgauge.trainer.report.read.run import ENDED, read_state
from narrowgauge.trainer.report.read.stored import COMPARISON, PlannedComparison, PlannedRun
from narrowgauge.trainer.report.verdict.expected import expectations
from narrowgauge.trainer.report.verdict.rows import rows_text
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.monitor.arithmetic import threads_of
from narrowgauge.trainer.runs.run_directory import RunDirectory

_PAGE_EVERY_S = 30.0  # while runs end


def run_experiment(
    experiment: Experiment,
    out: Path,
    console: Console,
    rank: int = 0,
    gate: Gate | None = None,
    command: str = "",
    is_expected: bool = False,
) -> int:
    """Print which gap the experiment will detect, train the remaining runs, and report the results.

    Args:
        experiment: The design.
        out: The directory of its runs.
        console: Receives the progress and the results.
        rank: The rank of this process under its launcher; only rank 0 writes into `out`.
        gate: The largest acceptable gap; with several rungs, at the highest.
        command: The command line, for the page.
        is_expected: Whether each gap is compared with its forecast.

    Returns:
        The exit code: 1 if a run failed, or if a variant does not pass the gate.

    Raises:
        UserError: the directory cannot be written, or holds other runs.
        ComparisonFailed: a run was killed or stopped, or could not start; the same command line continues.
    """
    experiment = _ready(experiment, out)
    planned = plan_of(experiment, out, command)
    for sentence in sight(planned, read_begun(compared(out, planned).paths)):
        console.print(sentence, style="dim", markup=False, highlight=False, soft_wrap=True)
    failed = _train(experiment, planned, out, console, rank)
    one = compared(out, planned)
    runs = read_begun(one.paths)
    results = [] if gate is None else gate_results(runs, gate)
    code = 1 if failed or any(result.word != "pass" for result in results) else 0
    if rank:  # rank 0 reports for all
        return code
    if experiment.is_measured:
        if experiment.design.probe:
            probe_arms(experiment, out)
        _say(console, f"results: {_rows_file(experiment, out)}")
    found = expectations(runs) if is_expected else []
    _write_page(one, expected_section(found))
    print_comparison(runs, console, judged(planned, runs))
    for expectation in found:
        _say(console, expectation.text)
    steps = experiment.trunks[0].config.training.steps
    where = f" at the highest rung, {steps:,} steps" if experiment.rungs > 1 else ""
    beside = {expectation.name: f"; {expectation.short}" for expectation in found}
    for result in results:
        _say(
            console,
            f"gate {gate}{where}: {result.name} {result.word}; {result.reason}{beside.get(result.name, '')}",
        )
    if failed:
        again = ", ".join(name for name in failed if state_of(out / name) == "open")
        way = f"; the same line tries {again} again" if again else ""
        _say(console, f"{len(failed)} of {len(experiment.compared)} runs failed: {', '.join(failed)}{way}")
    if runs:
        _say(console, f"report: {out / 'report.html'}")
    return code


def print_plan(experiment: Experiment, out: Path, console: Console) -> None:
    """Print which gap the experiment will detect and which runs, tokens and hours remain; do not train."""
    experiment = _ready(experiment, out)
    planned = plan_of(experiment, out)
    for sentence in sight(planned, read_begun(compared(out, planned).paths)):
        _say(console, sentence)
    speeds = arm_speeds(experiment, out, lambda sentence: _say(console, sentence))
    for line in plan_lines(experiment, out, speeds):
        _say(console, line)


def _ready(experiment: Experiment, out: Path) -> Experiment:
    """The experiment with equal threads, whose runs in `out`, if any, are of the same values."""
    experiment = with_equal_threads(experiment, out)
    for run in experiment.runs:
        require_same(run, out)
    return experiment


def _train(
    experiment: Experiment, planned: PlannedComparison, out: Path, console: Console, rank: int
) -> list[str]:
    """Train the remaining runs of an experiment; returns the names of the failed runs.

    The rows and the page are written as results come in. A diverged run of a measured experiment has not
    failed: it is a row of the results.
    """
    waiting = remaining(experiment, out)
    left = [run for run in waiting if not is_complete(experiment, run, out)]
    tokens = sum(run.tokens_to_train for run in left if state_of(out / run.name) == "open")
    total, written, design = len(experiment.compared), -math.inf, experiment.design
    with ExitStack() as stack:
        files = out if rank == 0 else Path(stack.enter_context(TemporaryDirectory()))
        try:
            make_directory(files)
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
        if rank == 0:
            write_whole(out / COMPARISON, planned.model_dump_json(indent=1) + "\n")
            _say_done(experiment, waiting, out, console)
        done = total - sum(bool(run.rung) for run in left)
        table = stack.enter_context(ProgressLine(console, tokens, total, done))

        def write(is_page_due: bool = True) -> None:
            if experiment.is_measured:
                write_whole(_rows_file(experiment, out), rows_text(collect_rows(experiment, out)))
                remove_checkpoints(experiment, waiting, out)
            if is_page_due:
                _write_page(compared(out, planned))

        def show(jobs: Sequence[Job], ended: Job | None) -> None:
            nonlocal written
            table.show(jobs, ended)
            if ended is not None and ended.is_last and rank == 0:
                write(is_page_due := time.monotonic() - written > _PAGE_EVERY_S)
                written = time.monotonic() if is_page_due else written

        environment = environment_of(design.threads or 0, design.products, design.attention)
        engine = Engine(design.jobs, environment, show, has_logs=rank == 0)
        try:
            engine.run(partial(next_job, experiment, waiting, out, files))
        finally:
            if rank == 0:
                write()
            for name in engine.failed:
                _say(console, f"{name}: {_last_line(out / f'{name}.log')}")
    states = {run.name: read_state(out / run.name)[0] for run in experiment.runs}
    bad = ("failed",) if experiment.is_measured else ("failed", "diverged")
    lost = [name for name in engine.failed if states[name] != "diverged"]
    return [name for name, state in states.items() if name in lost or state in bad]


def _say_done(experiment: Experiment, waiting: Sequence[ArmRun], out: Path, console: Console) -> None:
    """Say which runs are not trained again."""
    left = {run.name for run in waiting}
    found = [run.name for run in experiment.compared if run.name not in left]
    if names := [f"{name} ({state})" for name in found if (state := state_of(out / name)) != "open"]:
        text = f"in {out}, not trained again: {', '.join(names)}"
        _say(console, f"{text}; to train them otherwise, name another directory with --out")


def _write_page(one: Subject, more: str = "") -> None:
    """Write OUT/report.html, once the reference's run has started."""
    if one.paths:
        states = runs_of(one)
        is_open = any(run.status not in (*ENDED, "unknown") for run in states)
        write_page(page_of(one, states if is_open else (), more=more), one.folder / "report.html")


def with_equal_threads(experiment: Experiment, out: Path) -> Experiment:
    """The experiment with the same `training.threads` in all runs on a CPU that do not set it.

    The last digits of losses depend on it. It is the number of threads of the existing runs, or of the
    currently free cores. A started run keeps its number. On a GPU digits do not depend on it.
    """
    if experiment.design.threads:  # each process receives them
        return experiment
    found = {run.name: RunDirectory(out / run.name) for run in experiment.runs}
    begun = {name: run for name, run in found.items() if (run.path / "config.toml").is_file()}
    number = next((threads for run in begun.values() if (threads := run.threads())), 0)
    number = number or threads_of([])[0]

    def with_threads(run: ArmRun) -> ArmRun:
        training = run.config.training
        if training.threads or choose_device(training.device).type != "cpu":
            return run
        threads = begun[run.name].config().training.threads if run.name in begun else number
        keys = {"training": training.model_copy(update={"threads": threads})}
        return replace(run, config=run.config.model_copy(update=keys))

    return replace(experiment, runs=tuple(map(with_threads, experiment.runs)))


def plan_of(experiment: Experiment, out: Path, command: str = "") -> PlannedComparison:
    """The plan of an experiment, for those who report it or watch it."""
    model = experiment.trunks[0].config.spec.model
    runs = [
        PlannedRun(
            name=run.name,
            arm=run.arm,
            seed=run.seed,
            rung=run.rung,
            steps=run.config.training.steps,
            tokens=run.tokens,
        )
        for run in experiment.runs
    ]
    return PlannedComparison(
        command=command,
        reference=experiment.arms[0],
        family=tuple(experiment.family),
        seeds=tuple(experiment.seeds),
        parameters=count_block_weights(model),
        is_quiet=not model.initial_std,  # no warm-up is expected to spike: the initial weights are by role
        rows=str(_rows_file(experiment, out).resolve()) if experiment.is_measured else "",
        runs=tuple(runs),
    )


def _rows_file(experiment: Experiment, out: Path) -> Path:
    return experiment.design.rows or out / "runs.csv"


def _last_line(log: Path) -> str:
    """The last line of a run's log: why it ended."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "it left no log"
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

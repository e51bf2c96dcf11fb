"""Trains the runs of an experiment, or continues them, and reports the results.

A run that is done or has diverged is a result and is not trained again; any other is started or continued, so
the same command line continues an experiment after any stop.
"""

import json
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
from narrowgauge.trainer.experiment.power import power_text
from narrowgauge.trainer.experiment.probe import probe_arms, read_probe
from narrowgauge.trainer.experiment.progress import ProgressTable
from narrowgauge.trainer.models import count_block_weights
from narrowgauge.trainer.report import Run, print_comparison, read_runs, write_report
from narrowgauge.trainer.report.page.rungs import rungs_section
from narrowgauge.trainer.report.page.sections import expected_section
from narrowgauge.trainer.report.read.stored import COMPARISON
from narrowgauge.trainer.report.table.rungs import print_results
from narrowgauge.trainer.report.verdict.expected import expectations
from narrowgauge.trainer.report.verdict.rungs import ArmResult, arm_results, rows_text
from narrowgauge.trainer.report.verdict.verdict import paired_gaps
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
    for sentence in _sight(experiment, out):
        console.print(sentence, style="dim", markup=False, highlight=False, soft_wrap=True)
    failed = train_runs(experiment, out, console, rank, command)
    runs = recorded_runs(experiment, out)
    results = [] if gate is None else gate_results(runs, gate)
    code = 1 if failed or any(result.word != "pass" for result in results) else 0
    if rank:  # rank 0 reports for all
        return code
    if experiment.is_measured:
        if experiment.probes:
            probe_arms(experiment, out)
        print_results(_results(experiment, out), console)
        _say(console, f"results: {_rows_file(experiment, out)}")
    found = expectations(runs) if is_expected else []
    write_page(experiment, out, command, expected_section(found))
    if runs:
        print_comparison(runs, console)
    for one in found:
        _say(console, one.text)
    steps = experiment.trunks[0].config.training.steps
    where = f" at the highest rung, {steps:,} steps" if experiment.rungs > 1 else ""
    beside = {one.name: f"; {one.short}" for one in found}
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
    experiment = with_equal_threads(experiment, out)
    for run in experiment.runs:
        require_same(run, out)
    for sentence in _sight(experiment, out):
        _say(console, sentence)
    speeds = arm_speeds(experiment, out, lambda sentence: _say(console, sentence))
    for line in plan_lines(experiment, out, speeds):
        _say(console, line)


def train_runs(
    experiment: Experiment, out: Path, console: Console, rank: int = 0, command: str = ""
) -> list[str]:
    """Train the remaining runs of an experiment; returns the names of the failed runs.

    The rows and the page are written as results come in. A diverged run of a measured experiment has not
    failed: it is a row of the results.

    Raises:
        UserError: the directory cannot be written, or holds other runs.
        ComparisonFailed: a run was killed or stopped, or could not start; the same command line continues.
    """
    experiment = with_equal_threads(experiment, out)
    for run in experiment.runs:
        require_same(run, out)
    waiting = remaining(experiment, out)
    with ExitStack() as stack:
        files = out if rank == 0 else Path(stack.enter_context(TemporaryDirectory()))
        try:
            make_directory(files)
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
        if rank == 0:
            write_whole(out / COMPARISON, _planned(experiment, out, command))
            _say_done(experiment, waiting, out, console)
        failed = _train(experiment, waiting, out, files, console, rank, command)
    names = [
        run.name
        for run in experiment.runs
        if run.name in failed or RunDirectory(out / run.name).status() == "failed"
    ]
    return [name for name in names if not (experiment.is_measured and state_of(out / name) == "diverged")]


def _say_done(experiment: Experiment, waiting: Sequence[ArmRun], out: Path, console: Console) -> None:
    """Say which runs are not trained again."""
    left = {run.name for run in waiting}
    found = [run.name for run in experiment.compared if run.name not in left]
    if names := [f"{name} ({state})" for name in found if (state := state_of(out / name)) != "open"]:
        text = f"in {out}, not trained again: {', '.join(names)}"
        _say(console, f"{text}; to train them otherwise, name another directory with --out")


def _train(
    experiment: Experiment,
    waiting: Sequence[ArmRun],
    out: Path,
    files: Path,
    console: Console,
    rank: int,
    command: str,
) -> list[str]:
    """Run the jobs of the waiting runs, and write what is known so far; returns the names of failed runs."""
    left = [run for run in waiting if not is_complete(experiment, run, out)]
    tokens = sum(run.tokens_to_train for run in left if state_of(out / run.name) == "open")
    total = len(experiment.compared)
    written = -math.inf

    def write(is_page_due: bool) -> None:
        if experiment.is_measured:
            write_rows(experiment, out)
            remove_checkpoints(experiment, waiting, out)
        if is_page_due:
            write_page(experiment, out, command)

    with ProgressTable(console, tokens, total, total - sum(bool(run.rung) for run in left)) as table:

        def show(jobs: Sequence[Job], ended: Job | None) -> None:
            nonlocal written
            table.show(jobs, ended)
            if ended is not None and ended.is_last and rank == 0:
                write(is_page_due := time.monotonic() - written > _PAGE_EVERY_S)
                written = time.monotonic() if is_page_due else written

        environment = environment_of(experiment.threads, experiment.products, experiment.attention)
        engine = Engine(experiment.jobs, environment, show, has_logs=rank == 0)
        try:
            return engine.run(partial(next_job, experiment, waiting, out, files))
        finally:
            if rank == 0:
                write(True)
            for name in engine.failed:
                _say(console, f"{name}: {_last_line(out / f'{name}.log')}")


def with_equal_threads(experiment: Experiment, out: Path) -> Experiment:
    """The experiment with the same `training.threads` in all runs on a CPU that do not set it.

    The last digits of losses depend on it. It is the number of threads of the existing runs, or of the
    currently free cores. A started run keeps its number. On a GPU digits do not depend on it.
    """
    if experiment.threads:  # each process receives them
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


def _planned(experiment: Experiment, out: Path, command: str) -> str:
    """The runs of an experiment as the text of a file, for those who watch it (`report.read.comparison`)."""
    plan = {
        "command": command,
        "reference": experiment.arms[0],
        "family": experiment.family,
        "seeds": experiment.seeds,
        "parameters": _parameters(experiment),
        "is_quiet": _is_quiet(experiment),
        "rows": str(_rows_file(experiment, out).resolve()) if experiment.is_measured else "",
        "runs": [
            {
                "name": run.name,
                "arm": run.arm,
                "seed": run.seed,
                "rung": run.rung,
                "steps": run.config.training.steps,
                "tokens": run.tokens,
            }
            for run in experiment.runs
        ],
    }
    return json.dumps(plan, indent=1) + "\n"


def write_rows(experiment: Experiment, out: Path) -> None:
    """Write the file of rows, with a row for each finished run of a measured experiment."""
    write_whole(_rows_file(experiment, out), rows_text(collect_rows(experiment, out)))


def _rows_file(experiment: Experiment, out: Path) -> Path:
    return experiment.rows or out / "runs.csv"


def write_page(experiment: Experiment, out: Path, command: str, more: str = "") -> None:
    """Write OUT/report.html, once the reference's run has started; `more` is HTML for its end."""
    if begun := _begun(experiment, out):
        write_report(begun, out / "report.html", command, _rungs_section(experiment, out) + more)


def _rungs_section(experiment: Experiment, out: Path) -> str:
    """The part of the page on all rungs; "" if nothing is measured, or the reference has no run yet."""
    rows = collect_rows(experiment, out) if experiment.is_measured else []
    if not rows or rows[0].arm != experiment.arms[0]:
        return ""
    return rungs_section(rows, _results(experiment, out), _parameters(experiment), read_probe(out))


def recorded_runs(experiment: Experiment, out: Path) -> list[Run]:
    """The begun runs at the highest rung, the reference's first."""
    begun = _begun(experiment, out)
    return read_runs(begun) if begun else []


def _begun(experiment: Experiment, out: Path) -> list[Path]:
    """The directories of the begun runs at the highest rung; [] if another machine trained the reference.

    Such runs have rows and no directory.
    """
    paths = [out / run.name for run in experiment.trunks]
    begun = [path for path in paths if (path / "config.toml").is_file()]
    return begun if begun[:1] == paths[:1] else []


def _results(experiment: Experiment, out: Path) -> list[ArmResult]:
    """The results of the finished runs."""
    rows = collect_rows(experiment, out)
    parameters, is_quiet = _parameters(experiment), _is_quiet(experiment)
    return arm_results(rows, experiment.arms[0], experiment.family, parameters, is_quiet=is_quiet)


def _parameters(experiment: Experiment) -> int:
    return count_block_weights(experiment.trunks[0].config.spec.model)


def _is_quiet(experiment: Experiment) -> bool:
    """Whether no warm-up is expected to spike: the initial weights are by role."""
    return not experiment.trunks[0].config.spec.model.initial_std


def _sight(experiment: Experiment, out: Path) -> Sequence[str]:
    """The gap that each rung will be able to detect."""
    sentences = []
    of_rung = {run.rung: run for run in experiment.compared}
    for number, run in sorted(of_rung.items()):
        text = power_text(
            len(experiment.seeds),
            len(experiment.family),
            run.tokens,
            _parameters(experiment),
            _gaps_so_far(experiment, out, number),
            _is_quiet(experiment),
        )
        sentences.append(f"rung {number}: {text}" if experiment.rungs > 1 else text)
    return sentences


def _gaps_so_far(experiment: Experiment, out: Path, rung: int) -> dict[str, dict[int, float]]:
    """The gaps in percent of each arm at a rung, by seed, from the finished runs."""
    if experiment.is_measured:
        return {one.arm: dict(one.gaps) for one in _results(experiment, out) if one.rung == rung}
    done = [out / run.name for run in experiment.runs if state_of(out / run.name) == "done"]
    return paired_gaps(read_runs(done)) if done else {}


def _last_line(log: Path) -> str:
    """The last line of a run's log: why it ended."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "it left no log"
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

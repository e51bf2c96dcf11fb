"""Trains the runs of an experiment, or continues them, and reports the results; or estimates what they take.

A run that is done or has diverged is a result and is not trained again; any other is started or continued, so
the same command line continues an experiment after any stop. Before it starts, `print_plan` gives its runs,
tokens and hours, by speeds that are measured on a few steps.

Once all runs are done, the recipe of each arm is probed: its effect on the reference's model, without
training. It is measured on the reference's run of the first seed at the highest rung, and kept in
OUT/probe.json. So a reader sees which figure of a minute predicts the gap of hours.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.units import human_count, human_duration
from narrowgauge.trainer.analysis import open_probed, probe, probe_json
from narrowgauge.trainer.bench.worker import own_step, random_batches
from narrowgauge.trainer.data import open_data
from narrowgauge.trainer.experiment.design import ArmRun, Experiment
from narrowgauge.trainer.experiment.findings import judged, page_of, sight
from narrowgauge.trainer.experiment.gate import Gate, GateResult, gate_results
from narrowgauge.trainer.experiment.jobs import (
    Engine,
    Job,
    ProgressLine,
    collect_rows,
    environment_of,
    is_complete,
    next_job,
    remaining,
    remove_checkpoints,
    require_same,
    state_of,
)
from narrowgauge.trainer.experiment.on_ray import slots_of
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.report import print_comparison
from narrowgauge.trainer.report.page.page import expected_section, write_page
from narrowgauge.trainer.report.page.standing import Subject, compared, read_begun, runs_of
from narrowgauge.trainer.report.read.run import ENDED, Run, look_at, read_state
from narrowgauge.trainer.report.read.stored import COMPARISON, Probe, read_stored
from narrowgauge.trainer.report.verdict.expected import expectations
from narrowgauge.trainer.report.verdict.verdict import rows_text
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.loop.resolve import check_data
from narrowgauge.trainer.runs.monitor.machine import arithmetic_of, compute_by, seconds, threads_of
from narrowgauge.trainer.runs.run_directory import PROBE, RunDirectory
from narrowgauge.trainer.training import Config

_STEPS = 2  # timed steps, after a first
_LONG_S = 10.0  # a first step that takes this long is timed itself, and not repeated
_FLOP = 2e12  # of a timed step on a CPU, about: ten seconds of two cores. A step of GPT-3 345M has 1.1e15


def measured_speed(config: Config, threads: int, products: str = "", attention: str = "") -> float:
    """Tokens/s of a few steps on random tokens in this process, under the machine's current load.

    On a CPU, which computes one sequence after the other, long steps are cut to `_FLOP`. Then the
    optimizer's part of a step counts too often, by a few percent.
    """
    check_data(config, open_data(config.data.source, config.data.tokenizer, config.data.weights))
    device = choose_device(config.training.device)
    config = shortened(config) if device.type == "cpu" else config
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    chosen = {"products": products, "attention": attention}
    compute_by({**arithmetic_of(config), **{what: way for what, way in chosen.items() if way}})
    try:
        step = own_step(config, device, random_batches(config, device))
        took = seconds(step, device)
        if took < _LONG_S or config.training.compile:
            took = sum(seconds(step, device) for _ in range(_STEPS)) / _STEPS
    finally:
        torch.set_num_threads(before)
        compute_by({})
    return config.training.batch_size * config.data.sequence_length / took


def shortened(config: Config) -> Config:
    """The configuration with at most `_FLOP` a step, or one sequence."""
    training, length = config.training, config.data.sequence_length
    sequences = max(1, int(_FLOP / (length * flops_per_token(config.spec.model, length))))
    size = min(training.micro_batch_size, sequences)
    count = min(training.batch_size // training.micro_batch_size, max(1, sequences // size))
    return config.with_training(micro_batch_size=size, batch_size=size * count)


def arm_speeds(experiment: Experiment, out: Path, console: Console) -> dict[str, float]:
    """Tokens/s of each arm: recorded if it has started, otherwise measured.

    It says so before each measurement, since compiling a first step takes long.
    """
    speeds: dict[str, float] = {}
    design = experiment.design
    for run in experiment.trunks:
        if (speed := look_at(out / run.name).tokens_per_s) is not None:
            speeds.setdefault(run.arm, speed)
    unknown = {run.arm: run.config for run in reversed(experiment.trunks) if run.arm not in speeds}
    for number, arm in enumerate((arm for arm in experiment.arms if arm in unknown), start=1):
        config = unknown[arm]
        first = "; the first is compiled, which may take minutes" if config.training.compile else ""
        _say(console, f"timing {arm}, {number} of {len(unknown)}: at most {1 + _STEPS} steps{first}")
        torch.compiler.reset()  # torch compiles at most eight variants of a function
        speeds[arm] = measured_speed(config, _threads(experiment), design.products, design.attention)
    return speeds


def _threads(experiment: Experiment) -> int:
    """The CPU threads of a run."""
    pinned = experiment.trunks[0].config.training.threads
    return experiment.design.threads or pinned or torch.get_num_threads()


_BATCHES, _DRAWS = 4, 4


def probe_arms(experiment: Experiment, out: Path) -> None:
    """Probe the recipe of each arm whose runs are done and that is not yet in OUT/probe.json."""
    trunk = experiment.trunks[0]
    kept = read_stored(Probe, out / PROBE)
    known = kept.model_dump()["recipes"] if kept else {}
    recipes = {
        run.arm: run.config.spec.recipe for run in experiment.trunks if state_of(out / run.name) == "done"
    }
    new = [replace(recipe, name=arm) for arm, recipe in recipes.items() if arm not in known]
    if not new or state_of(out / trunk.name) != "done":
        return
    try:
        subject = open_probed(out / trunk.name, trunk.config.training.device, batches=_BATCHES).subject
    except UserError:  # its checkpoint was removed by hand: the gaps are reported without it
        return
    found = probe_json(probe(subject, new, _DRAWS), run=trunk.name, draws=_DRAWS)
    by_arm = {**known, **found["recipes"]}
    found["recipes"] = {arm: by_arm[arm] for arm in experiment.arms if arm in by_arm}
    write_whole(out / PROBE, json.dumps(found, indent=1) + "\n")


_PAGE_EVERY_S = 30.0  # while runs end


def run_experiment(
    experiment: Experiment,
    out: Path,
    console: Console,
    rank: int = 0,
    gate: Gate | None = None,
    command: str = "",
    is_expected: bool = False,
) -> tuple[list[Run], list[GateResult], bool]:
    """Print which gap the experiment will detect, train the remaining runs, and report the results.

    Only rank 0 writes into `out`. With `is_expected` each gap is compared with its forecast.

    Returns:
        The runs at the highest rung, the gate's decisions, and whether a run failed or did not pass.
    """
    experiment = _ready(experiment, out, console, "dim").model_copy(update={"command": command})
    failed = _train(experiment, out, console, rank)
    one = compared(out, experiment)
    runs = read_begun(one.paths)
    results = [] if gate is None else gate_results(runs, gate)
    has_failed = bool(failed) or any(result.word != "pass" for result in results)
    if rank:  # rank 0 reports for all
        return runs, results, has_failed
    if experiment.is_measured:
        if experiment.design.probe:
            probe_arms(experiment, out)
        _say(console, f"results: {out / experiment.rows}")
    found = expectations(runs) if is_expected else []
    _write_page(one, expected_section(found))
    print_comparison(runs, console, judged(one, runs))
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
    return runs, results, has_failed


def print_plan(experiment: Experiment, out: Path, console: Console) -> None:
    """Print which gap the experiment will detect and which runs, tokens and hours remain; do not train."""
    experiment = _ready(experiment, out, console)
    speeds, total, seconds = arm_speeds(experiment, out, console), 0, 0.0
    for arm in experiment.arms:
        runs = [run for run in experiment.compared if run.arm == arm]
        waiting = [run for run in runs if state_of(out / run.name) == "open"]
        left, count = sum(run.tokens_to_train for run in waiting), len(runs)
        took = left / speeds[arm]
        total, seconds = total + left, seconds + took
        _say(
            console,
            f"{arm:24} {count:4} run{'s'[: count != 1]}, {count - len(waiting)} done, {human_count(left):>7} "
            f"tokens left, {speeds[arm]:8,.0f} tokens/s, {human_duration(took):>11}",
        )
    jobs = experiment.design.jobs
    _say(
        console,
        f"in all {human_count(total)} tokens left, {human_duration(seconds)} of {_threads(experiment)} "
        f"thread(s), {human_duration(seconds / jobs)} with {jobs} at a time on {os.cpu_count()} cores",
    )


def _ready(experiment: Experiment, out: Path, console: Console, style: str = "") -> Experiment:
    """Print what the experiment will detect; returns it with equal threads, its runs in `out` unchanged."""
    experiment = with_equal_threads(experiment, out)
    for run in experiment.runs:
        require_same(run, out)
    one = compared(out, experiment)
    for sentence in sight(one, read_begun(one.paths)):
        _say(console, sentence, style)
    return experiment


def _train(experiment: Experiment, out: Path, console: Console, rank: int) -> list[str]:
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
            write_whole(out / COMPARISON, experiment.model_dump_json(indent=1) + "\n")
            _say_done(experiment, waiting, out, console)
        done = total - sum(bool(run.rung) for run in left)
        table = ProgressLine(console, tokens, total, done)
        if console.is_terminal:
            stack.enter_context(table.live)

        def write(is_page_due: bool = True) -> None:
            if experiment.is_measured:
                write_whole(out / experiment.rows, rows_text(collect_rows(experiment, out)))
                remove_checkpoints(experiment, waiting, out)
            if is_page_due:
                _write_page(compared(out, experiment))

        def show(jobs: Sequence[Job], ended: Job | None) -> None:
            nonlocal written
            table.show(jobs, ended)
            if ended is not None and ended.is_last and rank == 0:
                write(is_page_due := time.monotonic() - written > _PAGE_EVERY_S)
                written = time.monotonic() if is_page_due else written

        environment = environment_of(design.threads or 0, design.products, design.attention)
        cores = design.threads or experiment.trunks[0].config.training.threads or 1
        cluster = (design.ray, cores) if design.ray else None
        slots = slots_of(*cluster) if cluster else design.jobs
        engine = Engine(slots, environment, show, cluster, rank == 0)
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
    number = next((threads for run in begun.values() if (threads := run.last("threads", 0))), 0)
    number = number or threads_of([])[0]

    def with_threads(run: ArmRun) -> ArmRun:
        training = run.config.training
        if training.threads or choose_device(training.device).type != "cpu":
            return run
        threads = begun[run.name].config().training.threads if run.name in begun else number
        keys = {"training": training.model_copy(update={"threads": threads})}
        return run.model_copy(update={"config": run.config.model_copy(update=keys)})

    return experiment.model_copy(update={"runs": tuple(map(with_threads, experiment.runs))})


def _last_line(log: Path) -> str:
    """The last line of a run's log: why it ended."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "it left no log"
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

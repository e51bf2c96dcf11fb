"""Runs the jobs of an experiment: each is a process, and as many run at a time as there are slots.

    train       a run, begun from the first of its sources whose checkpoint is there (`--branch`)
    eval        for a measured experiment: two losses on the held-out tokens, `eval --forward`

The next job follows from the files on disk, and nothing else is stored, so an experiment continues after any
kill. A run that has diverged is a result.

One loop starts a process wherever a slot is free, and checks a few times a second which of them have ended.
Each writes a log next to its run's directory. Several runs at a time share the cores, or get one GPU each.
Meanwhile a line shows the running jobs, the finished runs and the time left.

Several engines may work on one directory: those of a Slurm job array, or of a command that was started twice.
The log of a run is locked as long as its process lives, on any machine of the file system, so each run has
one process. An engine ends when all runs have; those of an engine that was killed are free at once.

SIGTERM, SIGUSR1 and Ctrl-C stop the experiment: every run saves, and the same command line continues it. If
this process is killed, the kernel kills its runs with it (on Linux), and they continue from their last
checkpoints.

Under a launcher (torchrun, srun) every launched process has an engine, and their children of one job are the
ranks of one run. Their rendezvous uses the run's name, because a launcher's store outlives a run.
"""

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from narrowgauge.system.errors import EXIT_PREEMPTED, ProcessFailed, UserError
from narrowgauge.system.files import write_whole
from narrowgauge.system.operating_system import fcntl
from narrowgauge.system.processes import Programs
from narrowgauge.system.signals import COMPARED
from narrowgauge.system.units import human_count
from narrowgauge.trainer.checkpoint import steps
from narrowgauge.trainer.distributed import RENDEZVOUS, world_from
from narrowgauge.trainer.experiment.design import ArmRun, Experiment
from narrowgauge.trainer.experiment.on_ray import command_on
from narrowgauge.trainer.report.read.run import look_at, read_state
from narrowgauge.trainer.report.verdict.verdict import DIVERGED, DONE, Row, read_rows
from narrowgauge.trainer.runs.choices import ATTENTION, PRODUCTS
from narrowgauge.trainer.runs.run_directory import EVALUATION, RunDirectory
from narrowgauge.trainer.training import to_toml

FORWARD = "bf16"  # the recipe of the second loss
_EVERY_S, _LINE_EVERY_S = 2.0, 30.0  # refresh on a terminal; longest silence elsewhere
_POLL_S, _WAIT_S = 0.25, 1.0  # between looks at own processes; at those of other engines
_PROGRAM = (sys.executable, "-m", "narrowgauge")
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Job:
    """A command of a run."""

    name: str  # of the run
    command: tuple[str, ...]  # the words of the command
    directory: Path  # of the run
    tokens: int  # the tokens that it trains on; 0 if it evaluates
    is_last: bool = True  # whether the run has its result when it ends

    @property
    def key(self) -> tuple[str, bool]:
        """What tells it from the others of an experiment: the run, and whether it trains."""
        return self.name, self.tokens > 0


def state_of(directory: Path) -> str:
    """The state of a run: "done", "diverged", or "open" if it has to be continued or started."""
    status, _ = read_state(directory)
    return status if status in ("done", "diverged") else "open"


def require_same(run: ArmRun, out: Path) -> None:
    """Check that an existing run, if any, started with the same values, by `train`'s rule."""
    directory = RunDirectory(out / run.name)
    if not (directory.path / "config.toml").is_file():
        return
    for key, (old, new) in directory.changes(run.config).items():
        change = f"{key} = {old!r}, and now it is {new!r}" if old != new else f"another text of {new!r}"
        raise UserError(
            f"{directory.path} holds a run with {change}; restore the old value, or name another "
            "directory with --out"
        )


def remaining(experiment: Experiment, out: Path) -> list[ArmRun]:
    """The runs of each arm and seed that lacks a result, here and in the file of rows, with their forks."""
    known = {row.key for row in _rows_before(experiment)}
    missing = {(r.arm, r.seed) for r in experiment.compared if not is_complete(experiment, r, out)}
    wanted = missing & {(run.arm, run.seed) for run in experiment.compared if run.key not in known}
    sources = {name for run in experiment.runs if (run.arm, run.seed) in wanted for name, _ in run.sources}
    return [run for run in experiment.runs if (run.arm, run.seed) in wanted or run.name in sources]


def _rows_before(experiment: Experiment) -> list[Row]:
    """The rows of the experiment that its file holds."""
    file = experiment.design.rows
    rows = read_rows(file) if file is not None and file.exists() else []
    tokens = {run.key: run.tokens for run in experiment.compared}
    for row in rows:
        if (now := tokens.get(row.key, row.tokens)) != row.tokens:
            raise UserError(
                f"{file} has {row.arm}, seed {row.seed}, rung {row.rung} after {row.tokens:,} "
                f"tokens, and now it is {now:,}; name another file of rows"
            )
    return rows


def is_complete(experiment: Experiment, run: ArmRun, out: Path) -> bool:
    """Whether a run has ended, and in a measured experiment has both losses."""
    if experiment.is_measured and run.rung:
        return _row(run, out) is not None
    return state_of(out / run.name) != "open"


def collect_rows(experiment: Experiment, out: Path) -> list[Row]:
    """The rows of the finished runs, by arm, seed and rung; rows already in its file stay there."""
    rows = {row.key: row for row in _rows_before(experiment)}
    rows |= {run.key: row for run in experiment.compared if (row := _row(run, out)) is not None}
    order = {arm: number for number, arm in enumerate(experiment.arms)}
    return sorted(rows.values(), key=lambda row: (order.get(row.arm, len(order)), *row.key))


def _row(run: ArmRun, out: Path) -> Row | None:
    """The row of a run, with both losses from its evaluation.json unless it diverged; None if not finished.

    Losses that a user measured differently, on other text or another number of batches, do not count.
    """
    own, bf16, state = math.nan, math.nan, state_of(out / run.name)
    if state == "done":
        wanted = {"data": None, "batches": run.config.validation.batches}
        wanted["sequence_length"] = run.config.data.sequence_length
        try:
            found = json.loads((out / run.name / EVALUATION).read_text(encoding="utf-8"))
            is_other = any(found.get(key, value) != value for key, value in wanted.items())
            state = "open" if is_other or found["step"] != run.steps else "done"
            own, bf16 = (math.nan if found[key] is None else float(found[key]) for key in ("own", FORWARD))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    if state == "open":
        return None
    if math.isfinite(own) and math.isfinite(bf16):
        return Row(*run.key, run.tokens, own, bf16, DONE)
    return Row(*run.key, run.tokens, math.nan, math.nan, DIVERGED)


def next_job(
    experiment: Experiment,
    runs: Sequence[ArmRun],
    out: Path,
    files: Path,
    begun: Container[tuple[str, bool]] = (),
) -> Job | None:
    """The first job that can start; None while all that are left wait for others, or have begun.

    Of the experiment's runs, these are to be trained. Their configurations are written to `files`: `out`, or
    elsewhere on ranks other than 0. `begun` has the keys of jobs that have begun, however they ended.
    """
    for run in runs:
        name, directory = run.name, out / run.name
        if state_of(directory) == "open":
            waits = any(state_of(out / source) == "open" for source, _ in run.sources)
            if not waits and (name, True) not in begun:
                is_last = bool(run.rung) and not experiment.is_measured
                return Job(name, _train(run, out, files), directory, run.tokens_to_train, is_last)
        elif not is_complete(experiment, run, out) and (name, False) not in begun:
            how = ("--batches", str(run.config.validation.batches), "--forward", FORWARD)
            command = (*_PROGRAM, "eval", str(directory), *how, "--device", run.config.training.device)
            return Job(name, command, directory, 0)
    return None


def _train(run: ArmRun, out: Path, files: Path) -> tuple[str, ...]:
    """The command that starts or continues a run."""
    file = files / f"{run.name}.toml"
    write_whole(file, to_toml(run.config))
    begun = (("--branch", f"{out / s}@{n}") for s, n in run.sources if n in steps(out / s / "checkpoints"))
    return (*_PROGRAM, "train", str(file), "--out", str(out / run.name), *next(begun, ()))


def remove_checkpoints(experiment: Experiment, runs: Sequence[ArmRun], out: Path) -> None:
    """Leave the last checkpoint of each run whose branches have all ended; others were kept for these."""
    waiting = [run for run in runs if not is_complete(experiment, run, out)]
    needed = {run.name for run in waiting} | {source for run in waiting for source, _ in run.sources}
    for run in runs:
        if run.rung and run.name not in needed and state_of(out / run.name) == "done":
            for step in steps(out / run.name / "checkpoints"):
                if step != run.config.training.steps:
                    shutil.rmtree(out / run.name / "checkpoints" / f"step-{step}")


class ProgressLine:
    """Prints a line for each finished run; shows running jobs on a terminal, elsewhere every 30 s."""

    def __init__(self, console: Console, left_tokens: int, runs: int, done: int) -> None:
        """Show an experiment: `done` of `runs` runs are finished, and `left_tokens` remain to be trained."""
        self.console, self.left, self.runs, self.done = console, left_tokens, runs, done
        self.trained = 0  # tokens of finished runs since the start
        self.started = self.shown = time.monotonic()
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, jobs: Sequence[Job], ended: Job | None) -> None:
        """Show the running jobs; `ended` has just succeeded."""
        self.trained += ended.tokens if ended else 0
        result, now = ended.name if ended and ended.is_last else "", time.monotonic()
        self.done += bool(result)
        if not result and now - self.shown <= (_EVERY_S if self.console.is_terminal else _LINE_EVERY_S):
            return
        self.shown = now
        states = [_state(job) for job in jobs]
        trained, passed = self.trained + sum(tokens for _, tokens in states), now - self.started
        left = max(self.left - trained, 0)
        text = f"{human_count(left)} tokens left"
        if trained > 0 and passed >= 1:
            minutes = round(left / trained * passed / 60)
            text += f", {minutes // 60}:{minutes % 60:02} h at this pace"
        at_work = f"{self.done}/{self.runs}  {text}; {', '.join(words for words, _ in states)}"
        if self.console.is_terminal:
            self.live.update(Text(at_work), refresh=True)
        if result or not self.console.is_terminal:
            line = f"{self.done}/{self.runs}  {result}  {text}" if result else at_work
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _state(job: Job) -> tuple[str, float]:
    """Name, step, loss and state of a running job, and the tokens that it has trained on.

    A branch counts from its beginning.
    """
    run = look_at(job.directory)
    if not run.steps or not run.planned_steps:
        return f"{job.name} starts", 0.0
    state = "trains" if job.tokens else "is evaluated"
    words = f"{job.name} {run.step}/{run.planned_steps} {run.steps[-1].loss:.4f} {state}"
    return words, job.tokens * run.step / run.planned_steps


NextJob = Callable[[Container[tuple[str, bool]]], Job | None]


class ComparisonFailed(ProcessFailed):
    """A run of a comparison has no result; `code` is its exit code, negative if a signal killed it."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"the run {name!r}", code, "; rerun the same command to resume")


@dataclass
class Engine:
    """Slots, and the jobs that ran in them."""

    slots: int  # the number of simultaneous processes
    environment: Mapping[str, str]  # environment variables of each process
    show: Callable[[Sequence[Job], Job | None], None]  # often, the running jobs and one that just succeeded
    cluster: tuple[str, int] | None = None  # the address of one of Ray that runs them, and the cores of each
    has_logs: bool = True  # whether a process writes to `OUT/NAME.log` instead of the terminal
    stop: int = 0  # the first signal that asked to stop, or SIGTERM after a run without a result
    running: dict[int, tuple[Job, Popen[bytes]]] = field(default_factory=dict)  # by slot
    begun: set[tuple[str, bool]] = field(default_factory=set)  # the keys of the jobs that have started
    failed: dict[str, int] = field(default_factory=dict)  # the failed jobs, with their exit codes
    lost: dict[str, int] = field(default_factory=dict)  # without a result: killed, stopped, or never started

    def run(self, next_job: NextJob) -> list[str]:
        """Run all jobs; returns the names of the failed runs. `next_job` gives the next one that can start.

        A run that fails by itself leaves the others alone, except those that wait for it. If one left no
        result, or a signal stopped the experiment, it raises ComparisonFailed.
        """
        with Programs() as programs, programs.forwarding(self._ask_to_stop):
            while self._fill(next_job, programs) or self.running:
                time.sleep(_POLL_S if self.running else _WAIT_S)
                self._collect()
        for name, code in self.lost.items():
            raise ComparisonFailed(name, code)
        if self.stop and (job := next_job(self.begun)) is not None:  # the finished jobs all succeeded
            raise ComparisonFailed(job.name, EXIT_PREEMPTED)
        return list(self.failed)

    def _fill(self, next_job: NextJob, programs: Programs) -> bool:
        """Start a job in every free slot while there are any; returns whether other engines hold some."""
        held: set[tuple[str, bool]] = set()
        for slot in (slot for slot in range(self.slots) if slot not in self.running and not self.stop):
            while job := next_job(self.begun | held):
                if (process := self._start(slot, job, programs)) is not None:
                    self.running[slot] = job, process
                    break
                held.add(job.key)  # the other engine may end before its run does
        return bool(held)

    def _start(self, slot: int, job: Job, programs: Programs) -> Popen[bytes] | None:
        """Start a job; None if another engine holds its run."""
        environment = {**os.environ, COMPARED: "1", RENDEZVOUS: job.name, **self.environment}
        if self.slots > 1 and (count := torch.cuda.device_count()):  # one of the GPUs that this process has
            visible = [*filter(None, os.environ.get(_GPUS, "").split(","))] or list(map(str, range(count)))
            environment[_GPUS] = visible[slot % count]
        options: dict[str, Any] = {}
        file = job.directory.with_name(f"{job.name}.log")
        command = command_on(*self.cluster, file, job.command) if self.cluster else job.command
        with file.open("ab") if self.has_logs else nullcontext() as log:
            if log is not None:
                options = {"stdin": DEVNULL, "stdout": log, "stderr": log}
            if log is not None and world_from(os.environ, 0).size == 1:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process inherits it
                except BlockingIOError:
                    return None
            self.begun.add(job.key)
            return programs.start(command, environment, **options)

    def _collect(self) -> None:
        """Record the processes that have ended."""
        for slot, (job, process) in sorted(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[slot]
            if code:
                self._note_failure(job, code)
            self._show(None if code else job)
        self._show(None)

    def _show(self, ended: Job | None) -> None:
        self.show([job for job, _ in self.running.values()], ended)

    def _note_failure(self, job: Job, code: int) -> None:
        if code == -self.stop:  # asked to stop before it could answer
            code = EXIT_PREEMPTED
        self.failed[job.name] = code
        has_failed = read_state(job.directory)[0] in ("failed", "diverged")
        if code == EXIT_PREEMPTED or code < 0 or (job.tokens and not has_failed):
            self.lost[job.name] = code
            self._ask_to_stop(signal.SIGTERM)

    def _ask_to_stop(self, number: int) -> None:
        self.stop = self.stop or number


def environment_of(threads: int, products: str = "", attention: str = "") -> dict[str, str]:
    """Variables of a process: its CPU threads, and its arithmetic (`Experiment`); 0 and "": its choice."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    cores = dict.fromkeys(names, str(threads)) if threads else {}
    return cores | {k: v for k, v in ((PRODUCTS, products), (ATTENTION, attention)) if v}

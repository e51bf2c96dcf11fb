"""Runs the jobs of an experiment: each is a process, and as many run at a time as there are slots.

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

import os
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from subprocess import DEVNULL, Popen
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from narrowgauge.system.errors import EXIT_PREEMPTED, ProcessFailed
from narrowgauge.system.operating_system import fcntl
from narrowgauge.system.processes import Programs
from narrowgauge.system.signals import COMPARED
from narrowgauge.system.units import human_count
from narrowgauge.trainer.distributed import RENDEZVOUS, world_from
from narrowgauge.trainer.experiment.jobs import Job
from narrowgauge.trainer.experiment.on_ray import command_on
from narrowgauge.trainer.report.read.run import look_at, read_state
from narrowgauge.trainer.runs.choices import ATTENTION, PRODUCTS

_EVERY_S, _LINE_EVERY_S = 2.0, 30.0  # refresh on a terminal; longest silence elsewhere


class ProgressLine(ExitStack):
    """Prints a line for each finished run; shows running jobs on a terminal, elsewhere every 30 s."""

    def __init__(
        self,
        console: Console,
        left_tokens: int,
        runs: int,
        done: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show an experiment: `done` of `runs` runs are finished, and `left_tokens` remain to be trained."""
        super().__init__()
        self.console, self.left, self.runs, self.done = console, left_tokens, runs, done
        self.trained = 0  # tokens of finished runs since the start
        self.clock = clock
        self.started = self.shown = clock()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        if console.is_terminal:
            self.enter_context(self._live)

    def show(self, jobs: Sequence[Job], ended: Job | None) -> None:
        """Show the running jobs; `ended` has just succeeded."""
        self.trained += ended.tokens if ended else 0
        result, now = ended.name if ended and ended.is_last else "", self.clock()
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
            self._live.update(Text(at_work), refresh=True)
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
    words = f"{job.name} {run.step}/{run.planned_steps} {run.last_loss:.4f} {state}"
    return words, job.tokens * run.step / run.planned_steps


_POLL_S, _WAIT_S = 0.25, 1.0  # between looks at own processes; at those of other engines
_GPUS = "CUDA_VISIBLE_DEVICES"

Running = dict[int, tuple[Job, Popen[bytes]]]  # by slot
NextJob = Callable[[Container[tuple[str, bool]]], Job | None]


class ComparisonFailed(ProcessFailed):
    """A run of a comparison has no result; `code` is its exit code, negative if a signal killed it."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"the run {name!r}", code, "; the same line continues")


@dataclass
class Engine:
    """Slots, and the jobs that ran in them."""

    slots: int  # the number of simultaneous processes
    environment: Mapping[str, str]  # environment variables of each process
    show: Callable[[Sequence[Job], Job | None], None]  # often, the running jobs and one that just succeeded
    cluster: tuple[str, int] | None = None  # the address of one of Ray that runs them, and the cores of each
    has_logs: bool = True  # whether a process writes to `OUT/NAME.log` instead of the terminal
    stop: int = 0  # the first signal that asked to stop, or SIGTERM after a run without a result
    begun: set[tuple[str, bool]] = field(default_factory=set)  # the keys of the jobs that have started
    failed: dict[str, int] = field(default_factory=dict)  # the failed jobs, with their exit codes
    lost: dict[str, int] = field(default_factory=dict)  # without a result: killed, stopped, or never started

    def run(self, next_job: NextJob) -> list[str]:
        """Run all jobs; returns the names of the failed runs.

        A run that fails by itself leaves the others alone, except those that wait for it.

        Args:
            next_job: The next job that can start, given the keys of those that have begun.

        Raises:
            ComparisonFailed: a run left no result, or a signal stopped the experiment; the same command line
                continues.
        """
        running: Running = {}
        with Programs() as programs, programs.forwarding(self._note_signal):
            while self._fill(running, next_job, programs) or running:
                time.sleep(_POLL_S if running else _WAIT_S)
                self._collect(running)
        for name, code in self.lost.items():
            raise ComparisonFailed(name, code)
        if self.stop and (job := next_job(self.begun)) is not None:  # the finished jobs all succeeded
            raise ComparisonFailed(job.name, EXIT_PREEMPTED)
        return list(self.failed)

    def _fill(self, running: Running, next_job: NextJob, programs: Programs) -> bool:
        """Start a job in every free slot while there are any; returns whether other engines hold some."""
        held: set[tuple[str, bool]] = set()
        for slot in (slot for slot in range(self.slots) if slot not in running and not self.stop):
            while job := next_job(self.begun | held):
                if (process := self._start(slot, job, programs)) is not None:
                    running[slot] = job, process
                    break
                held.add(job.key)  # the other engine may end before its run does
        return bool(held)

    def _start(self, slot: int, job: Job, programs: Programs) -> Popen[bytes] | None:
        """Start a job; None if another engine holds its run."""
        environment = {**os.environ, COMPARED: "1", RENDEZVOUS: job.name, **self.environment}
        if self.slots > 1:
            environment |= _gpu(slot)
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

    def _collect(self, running: Running) -> None:
        """Record the processes that have ended."""
        for slot, (job, process) in sorted(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[slot]
            if code:
                self._note_failure(job, code)
            self.show(_jobs(running), None if code else job)
        self.show(_jobs(running), None)

    def _note_failure(self, job: Job, code: int) -> None:
        if code == -self.stop:  # asked to stop before it could answer
            code = EXIT_PREEMPTED
        self.failed[job.name] = code
        has_failed = read_state(job.directory)[0] in ("failed", "diverged")
        if code == EXIT_PREEMPTED or code < 0 or (job.tokens and not has_failed):
            self.lost[job.name] = code
            self.stop = self.stop or signal.SIGTERM

    def _note_signal(self, number: int) -> None:
        self.stop = self.stop or number


def _jobs(running: Running) -> list[Job]:
    return [running[slot][0] for slot in sorted(running)]


def environment_of(threads: int, products: str = "", attention: str = "") -> dict[str, str]:
    """Variables of a process: its CPU threads, and its arithmetic (`Experiment`); 0 and "": its choice."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    cores = dict.fromkeys(names, str(threads)) if threads else {}
    return cores | {k: v for k, v in ((PRODUCTS, products), (ATTENTION, attention)) if v}


def _gpu(slot: int) -> Mapping[str, str]:
    """A GPU for each slot, out of those available to this process; {} on a machine without one."""
    if not (count := torch.cuda.device_count()):
        return {}
    visible = os.environ.get(_GPUS, "").split(",") if os.environ.get(_GPUS) else list(map(str, range(count)))
    return {_GPUS: visible[slot % count]}

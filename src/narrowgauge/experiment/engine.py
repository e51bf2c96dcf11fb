"""Runs the jobs of an experiment: each is a process, one after the other or several side by side.

One loop starts a process wherever a place is free, and checks a few times a second which of them have ended.
A place runs one chain at a time, because a branch needs its trunk. Runs that take turns show their steps and
use all cores and GPUs; simultaneous runs each write a log next to their directory, and get a share of the
cores or one GPU.

SIGTERM, SIGUSR1 and Ctrl-C stop the experiment: every run saves, and the same command line continues it. If
this process is killed, the kernel kills its runs with it (on Linux), and they continue from their last
checkpoints.

Under a launcher (torchrun, srun) every launched process has an engine, and their children of one job are the
ranks of one run. Their rendezvous uses the run's name, because a launcher's store outlives a run.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import DEVNULL, Popen

import torch

from narrowgauge.distributed import RENDEZVOUS
from narrowgauge.errors import ProcessFailed
from narrowgauge.experiment.jobs import Job, state_of
from narrowgauge.processes import Programs
from narrowgauge.report.read.records import read_status
from narrowgauge.runs.choices import ATTENTION, PRODUCTS
from narrowgauge.signals import COMPARED

_POLL_S = 0.25
_STOPPED = 75  # the exit code of a run that has saved and can be continued
_GPUS = "CUDA_VISIBLE_DEVICES"


class ComparisonFailed(ProcessFailed):
    """A run of a comparison has no result; `code` is its exit code, negative if a signal killed it."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"the run {name!r}", code, "; the same line continues")


@dataclass
class Place:
    """A slot for one process; `job` and `process` are None while it is free."""

    number: int
    jobs: Iterator[Job] = field(default_factory=lambda: iter(()))
    job: Job | None = None
    process: Popen[bytes] | None = None


@dataclass
class Engine:
    """Places, and the chains waiting for one.

    Attributes:
        places: The number of simultaneous processes.
        environment: Environment variables of each process.
        show: Called often with the running jobs, and with the one that has just succeeded, if any.
        has_logs: Whether a process writes to `OUT/NAME.log` instead of the terminal.
        stop: The first signal that asked to stop, or SIGTERM after a run without a result.
        failed: The failed jobs, with their exit codes.
        lost: The jobs that left no result: killed, stopped, or never started.
    """

    places: int
    environment: Mapping[str, str]
    show: Callable[[Sequence[Job], Job | None], None]
    has_logs: bool = True
    stop: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def run(self, chains: Sequence[Iterator[Job]]) -> list[str]:
        """Run all jobs of all chains, each chain in order; returns the names of the failed runs.

        A run that fails by itself ends its chain, unless it diverged, and the other chains continue.

        Raises:
            ComparisonFailed: a run left no result, or a signal stopped the experiment; the same command line
                continues.
        """
        waiting = list(chains)[::-1]
        places = [Place(number) for number in range(self.places)]
        with Programs() as programs, programs.forwarding(self._note_signal):
            self._fill(places, waiting, programs)
            while any(place.process for place in places):
                time.sleep(_POLL_S)
                self._collect(places)
                self._fill(places, waiting, programs)
        for name, code in self.lost.items():
            raise ComparisonFailed(name, code)
        left = [place.jobs for place in places] + waiting if self.stop else []
        for job in (job for jobs in left for job in jobs):  # the finished jobs all succeeded
            raise ComparisonFailed(job.name, _STOPPED)
        return list(self.failed)

    def _fill(self, places: Sequence[Place], waiting: list[Iterator[Job]], programs: Programs) -> None:
        """Start a job in every free place while there are any."""
        for place in places:
            while place.process is None and not self.stop:
                if (job := next(place.jobs, None)) is not None:
                    self._start(place, job, programs)
                elif waiting:
                    place.jobs = waiting.pop()
                else:
                    break

    def _start(self, place: Place, job: Job, programs: Programs) -> None:
        environment = {**os.environ, COMPARED: "1", RENDEZVOUS: job.name, **self.environment}
        if self.places > 1:
            environment |= _gpu(place.number)
        place.job = job
        if not self.has_logs:
            place.process = programs.start(job.command, environment)
            return
        with job.directory.with_name(f"{job.directory.name}.log").open("ab") as log:
            place.process = programs.start(job.command, environment, stdin=DEVNULL, stdout=log, stderr=log)

    def _collect(self, places: Sequence[Place]) -> None:
        """Record the processes that have ended."""
        for place in places:
            if place.process is None or (code := place.process.poll()) is None:
                continue
            ended, place.process, place.job = place.job, None, None
            assert ended is not None
            if code:
                self._note_failure(place, ended, code)
            self.show([place.job for place in places if place.job], None if code else ended)
        self.show([place.job for place in places if place.job], None)

    def _note_failure(self, place: Place, job: Job, code: int) -> None:
        self.failed[job.name] = code
        if not (job.tokens and state_of(job.directory) == "diverged"):
            place.jobs = iter(())  # its chain waits for the next invocation
        status, *_ = read_status(job.directory / "status.json")
        if code == _STOPPED or code < 0 or (job.tokens and status != "failed"):
            self.lost[job.name] = code
            self.stop = self.stop or signal.SIGTERM

    def _note_signal(self, number: int) -> None:
        self.stop = self.stop or number


def environment_of(threads: int, products: str = "", attention: str = "") -> dict[str, str]:
    """Variables of a process: its CPU threads, and its arithmetic (`Experiment`); 0 and "": its choice."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    cores = dict.fromkeys(names, str(threads)) if threads else {}
    return cores | {k: v for k, v in ((PRODUCTS, products), (ATTENTION, attention)) if v}


def _gpu(place: int) -> Mapping[str, str]:
    """A GPU for each place, out of those available to this process; {} on a machine without one."""
    if not (count := torch.cuda.device_count()):
        return {}
    visible = os.environ.get(_GPUS, "").split(",") if os.environ.get(_GPUS) else list(map(str, range(count)))
    return {_GPUS: visible[place % count]}

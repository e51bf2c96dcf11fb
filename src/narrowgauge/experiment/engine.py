"""Several runs side by side: each is a process with its share of the cores or with a GPU of its own.

One loop starts a process wherever a place is free, and looks a few times a second which of them have ended. A
place is a chain at a time, because a branch needs its trunk. SIGTERM, SIGUSR1 and Ctrl-C stop the ladder:
every run saves, and the same line goes on. If this process is killed, the kernel kills its runs with it (on
Linux), and they go on from their last checkpoints.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO

import torch

from narrowgauge.experiment.compare import ComparisonFailed
from narrowgauge.experiment.jobs import Job, state_of
from narrowgauge.files import make_directory
from narrowgauge.operating_system import STOP_SIGNALS
from narrowgauge.runs.monitor.products import PRODUCTS
from narrowgauge.signals import COMPARED

_POLL_S = 0.25
_STOPPED = 75  # the exit code of a run that has saved and may go on


@dataclass
class Place:
    """Room for one process; `job` and `process` are None while it waits."""

    number: int
    jobs: Iterator[Job] = field(default_factory=lambda: iter(()))
    job: Job | None = None
    process: subprocess.Popen[bytes] | None = None
    log: BinaryIO | None = None


@dataclass
class Engine:
    """Places, and the chains that wait for one.

    Attributes:
        places: How many processes run at a time.
        environment: Variables of each process.
        show: Called often with the jobs that run, and with the one that has just ended, if any.
        stop: The first signal that asked to stop.
        failed: The jobs that failed without having diverged, with their exit codes.
    """

    places: int
    environment: Mapping[str, str]
    show: Callable[[Sequence[Job], Job | None], None]
    stop: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    def run(self, chains: Sequence[Iterator[Job]]) -> None:
        """Run all jobs of all chains, a chain in its order.

        Raises:
            ComparisonFailed: a run failed, or a signal stopped the ladder; the same line continues.
        """
        waiting = list(chains)[::-1]
        places = [Place(number) for number in range(self.places)]
        with self._signals(places):
            try:
                self._fill(places, waiting)
                while any(place.process for place in places):
                    time.sleep(_POLL_S)
                    self._collect(places)
                    self._fill(places, waiting)
            finally:
                for place in places:
                    if place.process is not None:
                        place.process.kill()
                        place.process.wait()
                    _close(place)
        for name, code in self.failed.items():
            raise ComparisonFailed(name, code)
        left = [place.jobs for place in places] + waiting if self.stop else []
        for job in (job for jobs in left for job in jobs):  # those that ran have ended well all the same
            raise ComparisonFailed(job.name, _STOPPED)

    def _fill(self, places: Sequence[Place], waiting: list[Iterator[Job]]) -> None:
        """Start a job in every free place, as long as there are any."""
        for place in places:
            while place.process is None and not self.stop:
                if (job := next(place.jobs, None)) is not None:
                    self._start(place, job)
                elif waiting:
                    place.jobs = waiting.pop()
                else:
                    break

    def _start(self, place: Place, job: Job) -> None:
        make_directory(job.directory.parent)
        place.log = job.directory.with_name(f"{job.directory.name}.log").open("ab")
        environment = {**os.environ, COMPARED: "1", **self.environment, **_gpu(place.number)}
        place.process = subprocess.Popen(
            job.command, env=environment, stdin=subprocess.DEVNULL, stdout=place.log, stderr=place.log
        )
        place.job = job

    def _collect(self, places: Sequence[Place]) -> None:
        """Note the processes that have ended."""
        ended = None
        for place in places:
            if place.process is None or (code := place.process.poll()) is None:
                continue
            ended, place.process, place.job = place.job, None, None
            _close(place)
            assert ended is not None
            if code and not (ended.tokens and state_of(ended.directory) == "diverged"):
                self.failed[ended.name] = code
                place.jobs = iter(())  # its chain waits for the next time
                if code == _STOPPED or code < 0:
                    self.stop = self.stop or signal.SIGTERM
            self.show([place.job for place in places if place.job], ended if code == 0 else None)
        self.show([place.job for place in places if place.job], None)

    @contextmanager
    def _signals(self, places: Sequence[Place]) -> Iterator[None]:
        """For the length of a `with`, what asks this process to stop is handed on to its runs.

        Ctrl-C reaches every process of a terminal; a second one would stop a run at once.
        """

        def forward(number: int, frame: FrameType | None) -> None:
            self.stop = self.stop or number
            for place in places:
                if place.process is not None and number != signal.SIGINT:
                    place.process.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def environment_of(threads: int, products: str) -> dict[str, str]:
    """Variables of a process: its CPU threads, and the precision of its products; "": it measures."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | ({PRODUCTS: products} if products else {})


def _gpu(place: int) -> Mapping[str, str]:
    """A GPU for each place; {} on a machine without one."""
    count = torch.cuda.device_count()
    return {"CUDA_VISIBLE_DEVICES": str(place % count)} if count else {}


def _close(place: Place) -> None:
    if place.log is not None:
        place.log.close()
        place.log = None

"""Profiles a few steps: a trace for Perfetto (ui.perfetto.dev), and the time by class of operation.

The first steps of a process are not typical (allocation, choice of kernels), so they are skipped. Then
torch's profiler records a few steps, which lengthens them: rely on the shares, not on the length of the step.

An operation belongs to the first class of `CLASSES` that matches its name or the name of a caller: a copy
inside the recipe's linear layer is a cast, and the same copy inside the optimizer belongs to the optimizer.
The time of an operation excludes its callees: on a GPU it is the time of its kernels, on a CPU the elapsed
time. The rest of the step is "idle": Python, waiting for data or other processes, or, on a GPU, any time
without a kernel.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from narrowgauge.trainer.runs.choices import PROFILED

_SKIPPED = 2  # steps of this process before the recorded ones

# The first match counts. The names belong to torch's operations and this package's autograd functions.
CLASSES = (
    ("communication", r"c10d|gloo:|nccl:|FSDP::|record_param_comms"),
    ("optimizer", r"Optimizer\.step|linalg_vector_norm"),
    ("attention", r"scaled_dot_product|flash_attention|ScaledDotProduct|_Attention|narrowgauge::attention"),
    ("GEMMs", r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_scaled_mm_v2)$|^narrowgauge::scaled_mm$"),
    ("loss", r"CrossEntropy|HeadLoss"),
    ("casts", r"LinearFunction|SwigluMlp|HeadLoss|^narrowgauge::emulate$"),
    ("norms and the rest", r""),
)


Result = TypeVar("Result")


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step, averaged over the recorded steps: in total, and by class."""

    step_ms: float
    classes: dict[str, float]
    device: str  # "cuda" if the classes are kernels, else "cpu"

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {ms / self.step_ms:.0%}" for name, ms in self.classes.items() if ms)
        return f"{self.step_ms:.1f} ms a step while it was profiled: {shares}"


@dataclass
class Profile:
    """The profile of some steps of a run, on one process."""

    directory: Path  # of the trace
    rank: int
    device: torch.device
    steps: int = PROFILED  # the number of steps to record
    _taken: int = 0
    _profiler: Any = None
    _wall_s: list[float] = field(default_factory=list)

    @property
    def trace(self) -> Path:
        """The file that Perfetto opens."""
        return self.directory / f"trace-rank-{self.rank}.json.gz"

    def step(self, number: int, take: Callable[[], Result], is_last: bool) -> tuple[Result, StepTime | None]:
        """Take a step; after the last recorded step, or the last of the run, also return the step time."""
        self._taken += 1
        if not _SKIPPED < self._taken <= _SKIPPED + self.steps:
            return take(), None
        if self._profiler is None:
            gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()
        start = time.perf_counter()
        with record_function(f"step {number}"):
            result = take()
        self._wall_s.append(time.perf_counter() - start)
        if not is_last and self._taken < _SKIPPED + self.steps:
            return result, None
        self._profiler.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.trace))
        events, self._profiler = self._profiler.events(), None
        on_gpu = self.device.type == "cuda"
        return result, step_time(events, sum(self._wall_s), len(self._wall_s), on_gpu)

    def close(self) -> None:
        """Stop recording, and discard an unfinished profile."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def step_time(events: Iterable[Any], wall_s: float, steps: int, on_gpu: bool) -> StepTime:
    """The time by class of a mean step, from the `FunctionEvent`s of `steps` steps in `wall_s` seconds.

    On a GPU the CPU events carry the time of the kernels they launched, and the classes count kernels.
    """
    microseconds = dict.fromkeys((name for name, _ in CLASSES), 0.0)
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.device_type.name == "CPU":
            self_time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if self_time and not event.name.startswith("step "):
                microseconds[class_of(tuple(callers(event)))] += self_time
        elif on_gpu and not getattr(event, "is_user_annotation", False):  # annotations span whole steps
            spans.append((event.time_range.start, event.time_range.end))
    busy = covered(spans) if on_gpu else sum(microseconds.values())
    classes = {name: us / 1e3 / steps for name, us in microseconds.items()}
    step_ms = wall_s * 1e3 / steps
    classes["idle"] = max(step_ms - busy / 1e3 / steps, 0.0)
    return StepTime(step_ms, classes, "cuda" if on_gpu else "cpu")


def callers(event: Any) -> Iterator[str]:
    """The names of an operation and of all its callers, innermost first."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


@cache
def class_of(names: tuple[str, ...]) -> str:
    """The class of an operation, given its name and its callers'."""
    return next(name for name, pattern in CLASSES if any(re.search(pattern, n) for n in names))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals: kernels of several streams run at the same time."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total

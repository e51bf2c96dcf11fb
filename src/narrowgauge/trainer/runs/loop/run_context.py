"""A run on one process: its objects, its origin, how it saves.

Saves and failed saves are events of the metrics:

    {"event": "save", "step": N}                        step N is published
    {"event": "save failed", "step": N, "reason": ...}  step N is not published; older ones are unchanged

An asynchronous save (`checkpoint.asynchronous`) takes some steps. Its event is written when its result is
known: at the next save, before a rollback, or at the end. The event has the number of the saved step, so
it may follow the lines of later steps. A kill in between loses only that event: a published checkpoint is
found, an unpublished one is invisible.

A full disk causes a warning and the run continues, since space may be freed. It ends the run if the save
is the last one or was requested by a signal, or after `MAX_FAILURES` consecutive failures. All
ranks know the result of a save and count the same failures.
"""

import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from narrowgauge.nn import DTYPES
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import AsyncSaver, SaveError
from narrowgauge.trainer.data import Dataset
from narrowgauge.trainer.distributed import NEVER, START, Coordinator
from narrowgauge.trainer.models import count_parameters, flops_per_token
from narrowgauge.trainer.runs.loop.resolve import Run
from narrowgauge.trainer.runs.monitor import machine
from narrowgauge.trainer.runs.monitor.machine import Arithmetic
from narrowgauge.trainer.runs.monitor.profiler import Profile
from narrowgauge.trainer.runs.monitor.progress import Display
from narrowgauge.trainer.runs.run_directory import RunWriter
from narrowgauge.trainer.training.step.trainer import Trainer

MAX_FAILURES = 3  # after three failed saves the disk is unlikely to be emptied


@dataclass
class RunContext:
    """A run on this process. Collective: every rank makes one, and calls `end` when the run has ended."""

    run: Run
    dataset: Dataset
    directory: RunWriter
    display: Display
    coordinator: Coordinator
    profile: Profile  # of some steps, or of none
    run_id: str = ""  # the id that a checkpoint must have to be resumed
    arithmetic: Arithmetic = field(default_factory=dict)  # of a CPU
    failures: int = 0  # of saves, since the last that succeeded
    _pending: int | None = None

    def __post_init__(self) -> None:
        self._saver = AsyncSaver(NEVER) if self.run.config.checkpoint.asynchronous else None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The origin of the run and the facts about it that its start and resume events record."""
        run, config = self.run, self.run.config
        try:
            installed = version("narrowgauge")
        except PackageNotFoundError:  # imported from source without being installed
            installed = "from source"
        origin = {"time": now(), "host": platform.node(), "version": installed, "command": command_line()}
        peak = machine.Yardstick(None, "")
        if self.coordinator.rank == 0:  # it records for all; simultaneous measurements would slow each other
            peak = machine.yardstick(run.device, DTYPES[config.spec.recipe.compute])
        return {
            **origin,
            "recipe": config.spec.recipe.name,
            "backend": run.backend.name,
            "backend_reason": run.backend.reason,
            "placement": run.placement,
            "device": machine.device_name(run.device),
            **self.arithmetic,
            "threads": torch.get_num_threads(),
            "processes": self.coordinator.size,
            "torch": torch.__version__,
            "parameters": count_parameters(config.spec.model),
            "flops_per_token": flops_per_token(config.spec.model, config.data.sequence_length),
            "peak_flops": peak.flops,
            "peak_source": peak.source,
            "corpus": self.dataset.digest,
        }

    def save(self, trainer: Trainer, must: bool) -> None:
        """Publish the current state before returning if `must`; otherwise the save may be asynchronous.

        Raises:
            SaveError: a save that must succeed failed, or too many failed in a row.
            PoisonedError: the state, or that of the previous asynchronous save, is not finite.
        """
        self.coordinator.progress(f"the save after step {trainer.step}", START)
        self.settle()
        self.directory.require_there()
        trainer.check_replicas()
        self.directory.sync_metrics()
        plan_for = partial(trainer.plan_save, self.directory.checkpoints, self.run_id)
        with self._recording_failure(trainer.step, must):
            if self._saver is None:
                plan_for(self.coordinator.control).write()
            else:
                self._saver.save(plan_for)
            self._pending = trainer.step
        if must or self._saver is None:
            self.settle(must)

    def settle(self, must: bool = False) -> None:
        """Wait for the pending save, if any, and record its result. Raises the same errors as `save`."""
        step, self._pending = self._pending, None
        if step is None:
            return
        with self._recording_failure(step, must):
            if self._saver is not None:
                self._saver.wait()
            self.failures = 0
            self.directory.record({"event": "save", "step": step})

    def end(self) -> None:
        """Wait for a pending save when the run ends; its errors do not hide the cause of the end."""
        if self._saver is None:
            return
        with suppress(UserError, OSError, RuntimeError):  # the cause of the run's end matters more
            self.settle()
        with suppress(RuntimeError):
            self._saver.close()

    @contextmanager
    def _recording_failure(self, step: int, must: bool) -> Iterator[None]:
        """Record a failed save of `step` in this block; re-raise the error if the run has to end."""
        try:
            yield
        except SaveError as error:
            self.failures += 1
            self.display.log(f"NOT SAVED: {error}")
            self.directory.record({"event": "save failed", "step": step, "reason": str(error)})
            if must:
                raise
            if self.failures >= MAX_FAILURES:
                raise SaveError(
                    f"{self.failures} saves in a row have failed, and what is trained is lost until one "
                    f"succeeds; the last one: {error}"
                ) from error


def now() -> str:
    """The time in UTC to the second, such as 2026-11-22T07:30:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str:
    """The command line of this process as one would type it, or that of a script with a custom loop."""
    program, *words = sys.argv or [""]
    name = "narrowgauge" if Path(program).name in ("__main__.py", "-m") else Path(program).name
    return shlex.join([name, *words])

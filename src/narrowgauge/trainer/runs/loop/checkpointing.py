"""Saves checkpoints during a run and handles failed saves.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import AsyncSaver, SaveError
from narrowgauge.trainer.distributed import NEVER, START, Coordinator
from narrowgauge.trainer.runs.run_directory import RunWriter
from narrowgauge.trainer.training.step.trainer import Trainer

MAX_FAILURES = 3  # after three failed saves the disk is unlikely to be emptied


class Checkpointer:
    """Saves a run's checkpoints, synchronously or asynchronously.

    Attributes:
        failures: the number of failures since the last successful save.
    """

    def __init__(
        self,
        directory: RunWriter,
        log: Callable[[str], None],
        coordinator: Coordinator,
        asynchronous: bool,
    ) -> None:
        """Save into `directory`. Collective: every rank makes one, and calls `end` when the run has ended."""
        self.directory, self.log, self.coordinator = directory, log, coordinator
        self._saver = AsyncSaver(NEVER) if asynchronous else None
        self.failures = 0
        self._pending: int | None = None

    def save(self, trainer: Trainer, run_id: str, must: bool) -> None:
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
        if self._saver is None:
            with self._recording_failure(trainer.step, must):
                trainer.save(self.directory.checkpoints, run_id, self.coordinator.control)
                self._succeeded(trainer.step)
            return
        directory, keep = self.directory.checkpoints, trainer.config.checkpoint.keep
        with self._recording_failure(trainer.step, must):
            local_tensors, state = trainer.local_tensors(), trainer.state()
            self._saver.save(directory, trainer.step, local_tensors, state, keep, run_id)
            self._pending = trainer.step
        if must:
            self.settle(must)

    def settle(self, must: bool = False) -> None:
        """Wait for the pending save, if any, and record its result. Raises the same errors as `save`."""
        if self._saver is None or self._pending is None:
            return
        step, self._pending = self._pending, None
        with self._recording_failure(step, must):
            self._saver.wait()
            self._succeeded(step)

    def end(self) -> None:
        """Wait for a pending save when the run ends; its errors do not hide the cause of the end."""
        if self._saver is None:
            return
        with suppress(UserError, OSError, RuntimeError):  # the cause of the run's end matters more
            self.settle()
        with suppress(RuntimeError):
            self._saver.close()

    def _succeeded(self, step: int) -> None:
        self.failures = 0
        self.directory.record({"event": "save", "step": step})

    @contextmanager
    def _recording_failure(self, step: int, must: bool) -> Iterator[None]:
        """Record a failed save of `step` in this block; re-raise the error if the run has to end."""
        try:
            yield
        except SaveError as error:
            self.failures += 1
            self.log(f"NOT SAVED: {error}")
            self.directory.record({"event": "save failed", "step": step, "reason": str(error)})
            if must:
                raise
            if self.failures >= MAX_FAILURES:
                raise SaveError(
                    f"{self.failures} saves in a row have failed, and what is trained is lost until one "
                    f"succeeds; the last one: {error}"
                ) from error

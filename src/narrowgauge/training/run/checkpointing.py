"""When is a step saved, and what becomes of a run whose saves fail?

    {"event": "save", "step": N}                        step N is published
    {"event": "save failed", "step": N, "reason": ...}  it is not; the older ones are as they were

In the background (`checkpoint.asynchronous`) a save takes some steps, and its line is written when it is
known how it ended: at the next save, before the run goes back to a checkpoint, and at the end. It bears the
number of the step that was saved, so it may stand after the lines of later steps. A kill in between costs
that line and nothing else: what is published is found, what is not is invisible.

A full disk is told loudly and ends nothing, since it may be mended while the run goes on. Where the save is
the last one, or the one that a signal asked for, it ends the run; and so do `checkpoint.max_failures` of them
in a row, which nobody is going to mend. All ranks know alike how a save ended, and count alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from narrowgauge.checkpoint import AsyncSaver, SaveError
from narrowgauge.distributed import NEVER, START, Coordinator
from narrowgauge.errors import UserError
from narrowgauge.training.config.config import Config
from narrowgauge.training.run.run_writer import RunWriter
from narrowgauge.training.step.trainer import Trainer


class Checkpointer:
    """The saves of a run, at once or in the background; made by `make_checkpointer`.

    Attributes:
        failures: how many failed since the last one that went well.
    """

    def __init__(
        self,
        directory: RunWriter,
        say: Callable[[str], None],
        coordinator: Coordinator,
        most: int,
        saver: AsyncSaver | None,
    ) -> None:
        """Of a directory; `saver` is the background, None without one."""
        self.directory, self.say, self.coordinator, self.most, self._saver = (
            directory,
            say,
            coordinator,
            most,
            saver,
        )
        self.failures = 0
        self._under_way: int | None = None

    def save(self, trainer: Trainer, run_id: str, must: bool) -> None:
        """Publish the state as it is now, in the background unless it `must` be there when this returns.

        Raises:
            SaveError: it was not published and must be, or it is one failure too many.
            PoisonedError: the state, or that of the save before in the background, is not finite.
        """
        self.coordinator.progress(f"the save after step {trainer.step}", START)
        self.settle()
        self.directory.require_there()
        trainer.check_replicas()
        self.directory.sync_metrics()
        if self._saver is None:
            with self._told(trainer.step, must):
                trainer.save(self.directory.checkpoints, run_id, self.coordinator.control)
                self._well(trainer.step)
            return
        keep = trainer.config.checkpoint.keep
        with self._told(trainer.step, must):
            self._saver.save(
                self.directory.checkpoints, trainer.step, trainer.pieces(), trainer.state(), keep, run_id
            )
            self._under_way = trainer.step
        if must:
            self.settle(must)

    def settle(self, must: bool = False) -> None:
        """Wait for the save that is under way, if any, and record how it ended. Raises as `save` does."""
        if self._saver is None or self._under_way is None:
            return
        step, self._under_way = self._under_way, None
        with self._told(step, must):
            self._saver.wait()
            self._well(step)

    def end(self) -> None:
        """Let a save that is under way come to its end when the run ends for a reason of its own."""
        if self._saver is None:
            return
        with suppress(UserError, OSError, RuntimeError):  # why the run ends is the news
            self.settle()
        with suppress(RuntimeError):
            self._saver.close()

    def _well(self, step: int) -> None:
        self.failures = 0
        self.directory.record({"event": "save", "step": step})

    @contextmanager
    def _told(self, step: int, must: bool) -> Iterator[None]:
        """Tell of a save of `step` that fails within, and end the run if that cannot be borne."""
        try:
            yield
        except SaveError as error:
            self.failures += 1
            self.say(f"NOT SAVED: {error}")
            self.directory.record({"event": "save failed", "step": step, "reason": str(error)})
            if must:
                raise
            if self.failures >= self.most:
                raise SaveError(
                    f"{self.failures} saves in a row have failed (checkpoint.max_failures = {self.most}), "
                    f"and what is trained is lost until one succeeds; the last one: {error}"
                ) from error


def make_checkpointer(
    config: Config, directory: RunWriter, say: Callable[[str], None], coordinator: Coordinator
) -> Checkpointer:
    """The saves of a run: all ranks of the run call this together, and `end` when the run has ended."""
    wanted = config.checkpoint
    saver = AsyncSaver(NEVER) if wanted.asynchronous else None
    return Checkpointer(directory, say, coordinator, wanted.max_failures, saver)

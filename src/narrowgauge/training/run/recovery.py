"""What follows from the guard's verdict on a step: event lines, a word to whoever watches, going back.

    spike       {"event": "spike", "step": N, "reason": ...}             the first of several in a row
    skip        {"event": "skip", ..., "first_bad": {layer, place, ...}}  `first_bad` where it was not finite
    rollback    {"event": "rollback", "step": M, "from_step": N, "skipped_samples": [A, B], ...}

A rollback restores a checkpoint of step M < N, and the lines of the steps after M go, as they do on a resume.
Which checkpoint: the newest valid one at a multiple of `checkpoint.every`, since one made because of a signal
or of the clock is not there in the undisturbed run; another only where there is none of that kind. Until the
next save the rollback is in memory alone: a run that is killed by then comes back to step M or before, meets
the same spike and takes the same decision.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowgauge.checkpoint import DamagedError, steps, verify
from narrowgauge.distributed import Coordinator
from narrowgauge.training.run_directory import RunDirectory
from narrowgauge.training.step.guard import GuardVerdict
from narrowgauge.training.step.trainer import Trainer


def recover(
    trainer: Trainer,
    directory: RunDirectory,
    run_id: str,
    loss: float,
    norm: float,
    say: Callable[[str], None],
    coordinator: Coordinator,
) -> bool:
    """Act on `trainer.verdict`; returns whether the run went back, so that its data has to be opened anew.

    Raises `Diverged` where the guard's patience is at its end.
    """
    verdict, guard = trainer.verdict, trainer.guard
    if verdict.action == "rollback":
        guard.require_patience(verdict, trainer.step)
        every = trainer.config.checkpoint.every
        target = (
            rollback_target(directory.checkpoints, run_id, trainer.step, every)
            if coordinator.rank == 0
            else None
        )
        name = coordinator.broadcast(None if target is None else target.name)
        if name is not None:
            figures = {"loss": loss, "grad_norm": norm}
            _roll_back(trainer, directory, directory.checkpoints / name, figures, say, coordinator)
            return True
        verdict = guard.cannot_roll_back(verdict)
    if verdict.action != "take":
        _tell(trainer, directory, verdict, say)
        guard.require_patience(verdict, trainer.step, str(trainer.first_bad or ""))
    return False


def rollback_target(checkpoints: Path, run_id: str, before: int, every: int) -> Path | None:
    """The checkpoint to go back to from step `before`, or None; every byte of it was verified."""
    older = [step for step in steps(checkpoints) if step < before]
    for step in sorted(older, key=lambda step: (step % every == 0, step), reverse=True):
        path = checkpoints / f"step-{step}"
        try:
            verify(path, run_id)
        except DamagedError:
            continue
        return path
    return None


def _roll_back(
    trainer: Trainer,
    directory: RunDirectory,
    path: Path,
    figures: dict[str, float],
    say: Callable[[str], None],
    coordinator: Coordinator,
) -> None:
    reason, before, spike = trainer.verdict.reason, trainer.guard, trainer.step
    trainer.restore(path, coordinator.control)
    guard = trainer.guard
    guard.rolled_back(before)
    directory.keep_metrics_until(trainer.step, guard.rollbacks)
    first = guard.samples - (spike - trainer.step) * trainer.config.training.batch_size
    event = {
        "event": "rollback",
        "step": trainer.step,
        "reason": reason,
        "from_step": spike,
        "figures": figures,
    }
    skipped = {"skipped_samples": [first, guard.samples - 1]}
    directory.record({**event, **skipped, "rollbacks": guard.rollbacks})
    say(f"step {spike}: {reason}; back to step {trainer.step}, and on with other data")


def _tell(
    trainer: Trainer, directory: RunDirectory, verdict: GuardVerdict, say: Callable[[str], None]
) -> None:
    event: dict[str, Any] = {"event": "spike" if verdict.takes else "skip", "step": trainer.step}
    event["reason"] = verdict.reason
    found = ""
    if trainer.first_bad is not None:
        event["first_bad"] = trainer.first_bad.as_json()
        found = f"; {trainer.first_bad}"
    directory.record(event)
    what = "a spike" if verdict.takes else "skipped"
    say(f"step {trainer.step}: {what}, {verdict.reason}{found}")

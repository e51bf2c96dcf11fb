"""Acts on the guard's verdict: writes the event, prints a message, rolls back, widens the place that broke.

    spike       {"event": "spike", "step": N, "reason": ...}             the first of several in a row
    skip        {"event": "skip", ..., "first_bad": {layer, place, ...}}  `first_bad` if not finite
    rollback    {"event": "rollback", "step": M, "from_step": N, "skipped_samples": [A, B], ...}
    raise       {"event": "raise", "step": M + 1, "place": "v", "layers": [...], "from": "e4m3", "to": "fp32"}

A rollback restores a checkpoint of step M < N, and drops the lines of later steps, as a resume does. The
target is the newest valid checkpoint at a multiple of `checkpoint.every`, because a checkpoint made by a
signal or the clock does not exist in an uninterrupted run; others are used only if there is none.

A raise (`guard.spike = "raise"`) widens the place that broke:

    1. the bad step is computed again under gauges; so is the step after the checkpoint to which the run goes
       back, as a good one for comparison. Neither counts as a step
    2. the place that broke is the first tensor that was finite before its cast but not after it
       (`step_faults`), else the one that the gauges show (`broken_place`). All processes read gauges, and
       each decides from the lines of all
    3. the run goes back to the checkpoint and continues with the same data; the place is wider from the next
       step on, for good: whatever broke it may return

The checkpoint to return to is at least two steps older than the bad step, since the step before it may have
done the damage. If there is none, the step is skipped, and the place is wider from the next step on.
Checkpoints store what is raised, so a resume needs nothing else.

Until the next save a rollback or raise exists only in memory: a run that is killed before then reaches the
same step again, reads the same figures and makes the same decision.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from narrowgauge.guard import Guard, GuardVerdict
from narrowgauge.guard.broken_place import BrokenPlace, find_broken
from narrowgauge.guard.raises import Raise
from narrowgauge.nn import Gauges
from narrowgauge.recipes import STATE_PLACES
from narrowgauge.trainer.checkpoint import DamagedError, steps, verify
from narrowgauge.trainer.runs.loop.run_context import RunContext
from narrowgauge.trainer.training.step.trainer import Trainer


def recover(context: RunContext, trainer: Trainer, loss: float, norm: float) -> bool:
    """Act on `trainer.verdict` on the last step, which had this loss and gradient norm.

    Returns whether the run was rolled back, so that its data must be opened again.
    """
    verdict, guard, step = trainer.verdict, trainer.guard, trainer.step
    if verdict.action == "raise":
        verdict = _raise(context, trainer, guard, step)
        if verdict.action == "raise":
            return True
    if verdict.action == "rollback":
        guard.require_patience(verdict, step)
        if (target := _target(context, step)) is not None:
            _roll_back(context, trainer, guard, step, target, {"loss": loss, "grad_norm": norm})
            return True
        verdict = guard.skip(verdict)
    if verdict.action != "take":
        _record_verdict(context, trainer, verdict)
        guard.require_patience(verdict, step, str(trainer.first_bad or ""))
    return False


def _target(context: RunContext, before: int) -> Path | None:
    """The checkpoint to return to from step `before`, if one is whole; the same on all ranks."""
    checkpoints, name = context.directory.checkpoints, None
    if context.coordinator.rank == 0:
        every, older = context.run.config.checkpoint.every, [s for s in steps(checkpoints) if s < before]
        for step in sorted(older, key=lambda step: (step % every == 0, step), reverse=True):
            with suppress(DamagedError):
                verify(checkpoints / f"step-{step}", context.run_id)
                name = f"step-{step}"
                break
    name = context.coordinator.broadcast(name)
    return None if name is None else checkpoints / name


def _raise(context: RunContext, trainer: Trainer, before: Guard, step: int) -> GuardVerdict:
    """Widen the place that broke in a step; the verdict is what remains to be done ("raise": nothing)."""
    if _go_further_back(context, trainer, before, step):
        return trainer.verdict
    verdict, target = trainer.verdict, _target(context, step - 1)
    broken = broke_in(context, trainer, target if verdict.is_finite else None)
    if broken is None and verdict.is_finite:
        return GuardVerdict("rollback", f"{verdict.reason}; no place broke")
    if broken is None:
        return before.skip(verdict, "no place broke")
    if target is not None:
        go_back(context, trainer, target)
        context.directory.keep_metrics_until(trainer.step, before.rollbacks)
    to = "fp32" if broken.place in STATE_PLACES else trainer.guard.rules.raise_to or trainer.recipe.compute
    words = f"step {step}: {verdict.reason}; {broken}"
    new = Raise(broken.place, broken.layers, broken.cast, to, trainer.step + 1, words)
    set_raised(context, trainer, [*trainer.guard.raised, new])
    back = "" if target is None else f"; back to step {trainer.step}"
    context.display.log(f"{words}, which becomes {to}{back}")
    return verdict if target is not None else before.skip(verdict)


def _go_further_back(context: RunContext, trainer: Trainer, before: Guard, step: int) -> bool:
    """Go to an older checkpoint if state was raised and a step breaks before the next save.

    Damage to the state before it was raised is in the checkpoint as well. The raise then takes effect from
    the older checkpoint on. Returns False if this is not the case or there is no older checkpoint.
    """
    last = before.raised[-1] if before.raised else None
    if last is None or not last.is_state or step - last.from_step >= context.run.config.checkpoint.every:
        return False
    if (target := _target(context, last.from_step - 1)) is None:
        return False
    reason = trainer.verdict.reason
    go_back(context, trainer, target)
    guard, first = trainer.guard, trainer.step + 1
    context.directory.keep_metrics_until(trainer.step, guard.rollbacks)
    set_raised(context, trainer, [replace(r, from_step=min(r.from_step, first)) for r in guard.raised])
    words = f"{last.place} was raised too late to heal it; further back, to step {trainer.step}"
    context.display.log(f"step {step}: {reason}; {words}")
    return True


def _roll_back(
    context: RunContext, trainer: Trainer, before: Guard, spike: int, path: Path, figures: dict[str, float]
) -> None:
    """Go back from a spike to a checkpoint; `before` is the guard's state at the spike."""
    reason = trainer.verdict.reason
    trainer.restore(path, context.coordinator.control)
    guard = trainer.guard
    guard.rolled_back(before)
    trainer.follow_rules()
    context.directory.keep_metrics_until(trainer.step, guard.rollbacks)
    first = guard.samples - (spike - trainer.step) * context.run.config.spec.batch_size
    event = {"event": "rollback", "step": trainer.step, "reason": reason, "from_step": spike}
    skipped = {"figures": figures, "skipped_samples": [first, guard.samples - 1]}
    context.directory.record({**event, **skipped, "rollbacks": guard.rollbacks})
    context.display.log(f"step {spike}: {reason}; back to step {trainer.step}, and on with other data")
    record_raises(context, trainer)


def _record_verdict(context: RunContext, trainer: Trainer, verdict: GuardVerdict) -> None:
    kind, action = ("spike", "a spike") if verdict.accepts else ("skip", "skipped")
    event: dict[str, Any] = {"event": kind, "step": trainer.step, "reason": verdict.reason}
    cause = ""
    if trainer.first_bad is not None:
        event["first_bad"] = asdict(trainer.first_bad)
        cause = f"; {trainer.first_bad}"
    context.directory.record(event)
    context.display.log(f"step {trainer.step}: {action}, {verdict.reason}{cause}")


def broke_in(context: RunContext, trainer: Trainer, target: Path | None) -> BrokenPlace | None:
    """The place that broke in the last step. Goes back to the state of `target`, if given."""
    bad, recipe = trainer.first_bad, trainer.recipe
    places = (*recipe.casts, *STATE_PLACES)
    if bad is not None and bad.is_of_cast and bad.place in places:  # it was finite before its cast
        cast = recipe.casts.get(bad.place) or recipe.state.get(bad.place)
        if cast is not None and cast.name not in wide_casts(trainer):
            return BrokenPlace(bad.place, (bad.layer,), cast.name, None)
    trainer.step -= 1
    is_finite = trainer.verdict.is_finite
    now = _read(trainer, trainer.micro_batches, update=is_finite and target is not None)
    trainer.step += 1
    before: list[dict[str, Any]] = []
    if target is not None:
        go_back(context, trainer, target)
        with trainer.batches(context.dataset.train) as batches:
            before = _read(trainer, trainer.next_micro_batches(batches), update=True)
    return find_broken(now, before, wide_casts(trainer))


def go_back(context: RunContext, trainer: Trainer, target: Path) -> None:
    """Go back to a checkpoint, keeping what has been raised since."""
    before = trainer.guard
    trainer.restore(target, context.coordinator.control)
    trainer.guard.went_back(before)
    trainer.follow_rules()


def set_raised(context: RunContext, trainer: Trainer, raised: list[Raise]) -> None:
    """Continue with these raises, in the state, the metrics and recipe.toml."""
    trainer.guard.raised = raised
    trainer.follow_rules()
    record_raises(context, trainer)


def wide_casts(trainer: Trainer) -> set[str]:
    """The names of casts that cannot be raised."""
    recipe = trainer.recipe
    return {"fp32", recipe.compute, trainer.guard.rules.raise_to or recipe.compute}


def record_raises(context: RunContext, trainer: Trainer) -> None:
    """Write what is raised to the run's metrics and recipe.toml."""
    if context.coordinator.rank > 0:
        return
    lines = context.directory.lines() if trainer.guard.raised else []
    known = [(e["step"], e["place"], e["layers"]) for e in lines if e.get("event") == "raise"]
    for r in trainer.guard.raised:
        if (r.from_step, r.place, list(r.layers)) not in known:
            context.directory.record(r.event)
    context.directory.record_rules([r.toml(trainer.recipe) for r in trainer.guard.raised])


def _read(trainer: Trainer, micro_batches: Sequence[Any], update: bool) -> list[dict[str, Any]]:
    """The gauges of the step after `trainer.step`, from all processes."""
    gauges = Gauges.of(trainer.model, trainer.optimizer, trainer.names)
    trainer.read_step(micro_batches, gauges, update)
    return [line for own in trainer.engine.gather(gauges.lines(trainer.step + 1)) for line in own]

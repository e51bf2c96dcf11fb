"""Widens the place that broke (`guard.spike = "raise"`).

    1. the bad step is computed again under gauges; so is the step after the checkpoint to which the run goes
       back, as a good one for comparison. Neither counts as a step
    2. the place that broke is the first tensor that was finite before its cast but not after it
       (`nan_tracer`), else the one that the gauges show (`broken_place`). All processes read gauges, and each
       decides from the lines of all
    3. the run goes back to the checkpoint and continues with the same data; the place is wider from the next
       step on, for good: whatever broke it may return

    {"event": "raise", "step": N, "place": "v", "layers": [...], "from": "e4m3", "to": "fp32"}

N of a raise is the first step in which it is in effect. The checkpoint to go back to is at least two steps
older than the bad step, since the step before it may have done the damage. If there is none, the step is
skipped, and the place is wider from the next step on.

Checkpoints store what is raised, so a resume needs nothing else. Until the next save the raise exists only in
memory: a run that is killed before then reaches the same step again, reads the same figures and makes the
same decision.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.guard.broken_place import BrokenPlace, find_broken
from narrowgauge.guard.raises import Raise
from narrowgauge.optim.gauges import make_gauges
from narrowgauge.recipes import STATE_PLACES
from narrowgauge.runs.loop.run_context import RunContext
from narrowgauge.training.step.nan_tracer import FirstBad
from narrowgauge.training.step.trainer import Trainer

Lines = list[dict[str, Any]]


def broke_in(context: RunContext, trainer: Trainer, target: Path | None) -> BrokenPlace | None:
    """The place that broke in the last step. Goes back to the state of `target`, if given."""
    bad = first_broken(trainer, trainer.first_bad)
    if bad is not None:
        return bad
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


def first_broken(trainer: Trainer, bad: FirstBad | None) -> BrokenPlace | None:
    """The place of a first bad tensor that was finite before its cast; None otherwise."""
    recipe = trainer.recipe
    if bad is None or not bad.is_of_cast or bad.place not in (*recipe.casts, *STATE_PLACES):
        return None
    cast = recipe.casts.get(bad.place) or recipe.state.get(bad.place)
    if cast is None or cast.name in wide_casts(trainer):
        return None
    return BrokenPlace(bad.place, (bad.layer,), cast.name, None)


def wide_casts(trainer: Trainer) -> set[str]:
    """The names of casts that cannot be raised."""
    recipe = trainer.recipe
    return {"fp32", recipe.compute, trainer.guard.rules.raise_to or recipe.compute}


def make_raise(trainer: Trainer, broken: BrokenPlace, reason: str) -> Raise:
    """The raise of a broken place, in effect from the next step on."""
    rules, recipe = trainer.guard.rules, trainer.recipe
    to = "fp32" if broken.place in STATE_PLACES else rules.raise_to or recipe.compute
    words = f"{reason}; {broken}"
    return Raise(broken.place, broken.layers, broken.cast, to, trainer.step + 1, words)


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
    gauges = make_gauges(trainer.model, trainer.optimizer, trainer.names)
    trainer.read_step(micro_batches, gauges, update)
    return [line for own in trainer.engine.gather(gauges.lines(trainer.step + 1)) for line in own]

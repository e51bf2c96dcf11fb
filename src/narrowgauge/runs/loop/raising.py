"""Widens the place that broke (`guard.spike = "raise"`), and lowers it again (`guard.lower_after`).

    1. the bad step is computed again under gauges; so is the step after the checkpoint to which the run goes
       back, as a good one for comparison. Neither counts as a step
    2. the place that broke is the first tensor that was finite before its cast but not after it
       (`nan_tracer`), else the one that the gauges show (`broken_place`). All processes read gauges, and each
       decides from the lines of all
    3. the run goes back to the checkpoint and continues with the same data; the place is wider from the next
       step on

    {"event": "raise", "step": N, "place": "v", "layers": [...], "from": "e4m3", "to": "fp32", "until": null}
    {"event": "lower", "step": N, ...}          after step N the place was lowered again

N of a raise is the first step in which it is in effect. The checkpoint to go back to is at least two steps
older than the bad step, since the step before it may have done the damage. If there is none, the step is
skipped, and the place is wider from the next step on.

Checkpoints store what is raised, so a resume needs nothing else. Until the next save the raise exists only in
memory: a run that is killed before then reaches the same step again, reads the same figures and makes the
same decision.

A trial reading (`read_trial`) gauges a cast that is not in use: the loss of a place if it were narrow again.
The last step is computed once more, and each operand is cast as the recipe specifies without the raise:
rounded to nearest, with a scale of its tensor. State is written into a copy.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.guard.broken_place import BROKEN, BrokenPlace, find_broken, lost_by_place
from narrowgauge.guard.raises import Raise
from narrowgauge.guard.widening import places_with
from narrowgauge.kernels import emulate
from narrowgauge.nn import Linear, Observation, recipe_tensors
from narrowgauge.optim.gauges import make_gauges
from narrowgauge.quantization import Cast, QuantizedState, gradient_of, local_tensor, shard_of, state_of
from narrowgauge.quantization.gauges.figures import figures, gauge_operand, gauge_state
from narrowgauge.recipes import STATE_PLACES
from narrowgauge.runs.loop.run_context import RunContext
from narrowgauge.training.step.nan_tracer import FirstBad
from narrowgauge.training.step.trainer import Trainer

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class TrialObserver:
    """Gauges some operands of a layer in the casts that its recipe has without rules (`nn.Observer`)."""

    layer: str
    casts: dict[str, Cast]
    lines: Lines

    def operand(self, observation: Observation) -> None:
        """Read the gauges of an operand."""
        o = observation
        if o.place not in self.casts:
            return
        cast = self.casts[o.place].having(rounding="nearest-even", history=0, margin=0, refresh=0)
        if not cast.of:
            seen, scale = emulate(o.x, cast, o.axis, torch.float32)
            numbers = seen if scale is None else seen * scale
            self.lines.append(_line(self.layer, o.place, cast, gauge_operand(o.x, numbers, cast, o.axis)))

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Ignore a matmul's result."""


def read_trial(trainer: Trainer, layers: Collection[str], places: Sequence[str]) -> Lines:
    """The losses of these places of some layers in the recipe's casts, on this process. Collective."""
    lines: Lines = []
    observed = [(n, m) for n, m in trainer.model.named_modules() if isinstance(m, Linear) and n in layers]
    for name, layer in observed:
        casts = {p: layer.recipe.casts[p] for p in places if p in layer.recipe.casts}
        layer.observer = TrialObserver(name, casts, lines) if casts else None
    before = {name: tensor.clone() for name, tensor in recipe_tensors(trainer.model).items()}
    trainer.compute_step()
    for _, layer in observed:
        layer.observer = None
    for name, p in trainer.model.named_parameters():
        if (layer_name := name.removesuffix(".weight")) in layers:
            lines += _state_lines(trainer, p, layer_name, places)
    for name, tensor in recipe_tensors(trainer.model).items():  # histories recorded the step twice
        tensor.copy_(before[name])
    return lines


@torch.no_grad()
def _state_lines(trainer: Trainer, p: torch.Tensor, layer: str, places: Sequence[str]) -> Lines:
    """The losses of a parameter's state; collective if processes share a scale."""
    kept = state_of(p)
    tensors = {place: state.read for place, state in trainer.optimizer.moments(p).items()}
    source = kept.master or kept.weight
    tensors["weight"] = local_tensor(p).float if source is None else source.read
    tensors["grad"] = lambda: local_tensor(g).float() if (g := gradient_of(p)) is not None else torch.zeros(0)
    if kept.master is not None:
        tensors["master"] = kept.master.read
    lines: Lines = []
    for place in places:
        cast = trainer.recipe.state.get(place)
        if place in tensors and cast is not None:
            x = tensors[place]()
            stored = QuantizedState(x.shape, cast, x.device, shard=shard_of(p))
            stored.write(x)
            lines.append(_line(layer, place, cast, gauge_state(x, stored)))
    return lines


def _line(layer: str, place: str, cast: Cast, vector: torch.Tensor) -> dict[str, Any]:
    return {"layer": layer, "place": place, "cast": cast.name, **figures(vector.tolist(), cast.element)}


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
    return BrokenPlace(bad.place, (bad.layer,), cast.name, None, BROKEN)


def wide_casts(trainer: Trainer) -> set[str]:
    """The names of casts that cannot be raised."""
    recipe = trainer.recipe
    return {"fp32", recipe.compute, trainer.guard.rules.raise_to or recipe.compute}


def make_raise(trainer: Trainer, broken: BrokenPlace, reason: str) -> Raise:
    """The raise of a broken place, in effect from the next step on."""
    rules, recipe = trainer.guard.rules, trainer.recipe
    first = trainer.step + 1
    until = 0 if rules.raise_steps == float("inf") else first + int(rules.raise_steps)
    to = "fp32" if broken.place in STATE_PLACES else rules.raise_to or recipe.compute
    words = f"{reason}; {broken}"
    return Raise(broken.place, broken.layers, broken.cast, to, first, until, broken.harmless, words)


def lower_places(context: RunContext, trainer: Trainer) -> None:
    """Lower what was raised `guard.lower_after` steps ago, or a multiple of that, if its gauges allow it."""
    guard, every = trainer.guard, trainer.guard.rules.lower_after
    step = trainer.step
    due = [r for r in guard.raised if every and r.holds(step + 1) and (step + 1 - r.from_step) % every == 0]
    for r in (r for r in due if step >= r.from_step):
        recipe = trainer.recipe
        places = places_with(recipe, r.place) if not r.is_state else (r.place,)
        lines = [line for own in trainer.engine.gather(read_trial(trainer, r.layers, places)) for line in own]
        lost = max(lost_by_place(lines, ()).values(), default=1.0)
        if lost > r.harmless:
            continue
        reason = f"{r.place} would lose {lost:.3g} of its values in {r.before}"
        lowered = replace(r, until_step=step + 1)
        set_raised(context, trainer, [lowered if other is r else other for other in guard.raised])
        context.directory.record({**lowered.event("lower", step), "reason": reason})
        context.display.log(f"step {step}: lowered again, {reason}")


def record_raises(context: RunContext, trainer: Trainer) -> None:
    """Write what is raised to the run's metrics and recipe.toml."""
    if context.coordinator.rank > 0:
        return
    lines = context.directory.lines() if trainer.guard.raised else []
    known = [(e["step"], e["place"], e["layers"]) for e in lines if e.get("event") == "raise"]
    for r in trainer.guard.raised:
        if (r.from_step, r.place, list(r.layers)) not in known:
            context.directory.record(r.event("raise", r.from_step))
    context.directory.record_rules([r.toml(trainer.recipe) for r in trainer.guard.raised])


def _read(trainer: Trainer, micro_batches: Sequence[Any], update: bool) -> list[dict[str, Any]]:
    """The gauges of the step after `trainer.step`, from all processes."""
    gauges = make_gauges(trainer.model, trainer.optimizer, trainer.names)
    trainer.read_step(micro_batches, gauges, update)
    return [line for own in trainer.engine.gather(gauges.lines(trainer.step + 1)) for line in own]

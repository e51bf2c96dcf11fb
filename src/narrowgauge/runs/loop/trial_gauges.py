"""Gauges of a cast that is not in use: what would a place lose, if it were narrow again?

The last step is computed once more, and each operand is cast as the recipe says without the raise: rounded to
nearest, with a scale of its own tensor. State is written into a copy.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.kernels import emulate
from narrowgauge.nn import Linear, Observation, recipe_tensors
from narrowgauge.quantization import Cast, QuantizedState, gradient_of, local_tensor, shard_of, state_of
from narrowgauge.quantization.gauges.figures import figures, gauge_operand, gauge_state
from narrowgauge.training.step.trainer import Trainer

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class TrialObserver:
    """Reads some operands of a layer in the casts that its recipe has without rules (`nn.Observer`)."""

    layer: str
    casts: dict[str, Cast]
    lines: Lines

    def operand(self, observation: Observation) -> None:
        """Read an operand."""
        o = observation
        if o.place not in self.casts:
            return
        cast = self.casts[o.place].having(rounding="nearest-even", history=0, margin=0, refresh=0)
        if not cast.of:
            seen, scale = emulate(o.x, cast, o.axis, torch.float32)
            numbers = seen if scale is None else seen * scale
            self.lines.append(_line(self.layer, o.place, cast, gauge_operand(o.x, numbers, cast, o.axis)))

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Ignore a product."""


def read_trial(trainer: Trainer, layers: Collection[str], places: Sequence[str]) -> Lines:
    """What these places of some layers would lose in the recipe's casts, in this process. Collective."""
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
    for name, tensor in recipe_tensors(trainer.model).items():  # histories saw the step twice
        tensor.copy_(before[name])
    return lines


@torch.no_grad()
def _state_lines(trainer: Trainer, p: torch.Tensor, layer: str, places: Sequence[str]) -> Lines:
    """What the state of a parameter would lose; a collective where processes share a scale."""
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

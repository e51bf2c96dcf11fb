"""The loss and the gradient of a model on one batch, under any recipe.

    with_recipe          a copy of trained weights under a recipe
    loss_of              one forward pass
    loss_and_gradient    a forward pass and a backward pass

The gradient is float32, whatever format the recipe keeps it in. If the recipe trains with a loss scale
(`torch.amp.GradScaler`), it is computed with one: 2^16, halved until every value is finite.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from narrowgauge.nn import set_step
from narrowgauge.quantization import gradient_of, write_weight
from narrowgauge.recipes import Recipe
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed import ModelSpec
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.training.step.build_model import build_model

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")
#: Takes the name of what is measured, how many parts are done, and their number.
Progress = Callable[[str, int, int], None]


def counted(name: str, items: Sequence[T], show: Progress | None) -> Iterator[T]:
    """Yield the items, and tell `show` how many are done."""
    for done, item in enumerate(items):
        if show is not None:
            show(name, done, len(items))
        yield item
    if show is not None:
        show(name, len(items), len(items))


class Position(NamedTuple):
    """A moment of training: timed rules apply as in this step, random bits follow from the seed."""

    seed: int
    step: int
    steps: int
    decay: int | None = None  #: the first step of the decay


def with_recipe(spec: ModelSpec, recipe: Recipe, weights: Tensors, device: torch.device) -> Transformer:
    """A model with these float32 weights, each rounded once to the recipe's format."""
    model = build_model(replace(spec, recipe=recipe), device)
    for name, parameter in model.named_parameters():
        write_weight(parameter, weights[name])
    return model.eval()  # without dropout


def linear_layers(model: Transformer) -> list[str]:
    """The names of the linear layers of a model, converted or not, in its order."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def loss_and_gradient(
    model: Transformer, batch: Batch, position: Position, loss_scale: float = 1.0
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of a batch in nats, and its gradient by parameter name, float32.

    Values that are not finite without a loss scale stay so.
    """
    scale = loss_scale
    while True:
        loss, gradient = _scaled(model, batch, position, scale)
        if scale == 1.0 or all(bool(g.isfinite().all()) for g in gradient.values()):
            return loss, {name: g / scale for name, g in gradient.items()}
        scale /= 2


def _scaled(
    model: Transformer, batch: Batch, position: Position, scale: float
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = _loss(model, batch, position)
    (loss * scale).backward()
    gradients = {name: gradient_of(p) for name, p in model.named_parameters()}
    return loss.item(), {name: g.clone() for name, g in gradients.items() if g is not None}


@torch.no_grad()
def loss_of(model: Transformer, batch: Batch, position: Position) -> float:
    """The mean loss of a batch in nats."""
    return _loss(model, batch, position).item()


def _loss(model: Transformer, batch: Batch, position: Position) -> torch.Tensor:
    set_step(model, position.seed, position.step, 0, position.steps, position.decay)
    batch = batch.to(model.embedding.weight.device)
    targets = batch.targets if batch.ignores else None
    return model.loss(batch.x_BT, batch.y_BT, batch.position_BT, targets)

"""The effect of a recipe on a model's loss and gradient, measured without training.

For each batch of held-out text, with f the loss of the weights in fp32, and for a recipe:

    loss_increase      loss under the recipe - f, in nats
    g                  the recipe's gradient, for each of several draws of random bits
    r                  the reference: the gradient of the same quantized forward pass with the recipe's
                       backward pass without its roundings, in fp32
    gradient_cosine    g.r / (|g| |r|)
    gradient_bias      mean of g.r / r.r over the draws, less 1: below 0, steps are too short along r
    effective_bits     -log2(|g - r|^2 / |r|^2) / 2: an error of half the gradient is one bit, a quarter two
    averaging_slope    the growth of these bits when draws are averaged (`averaging`): 0.5 without bias, 0
                       with only bias
    noise_ratio        |r| / |n|, with |n|^2 = |g_1 - g_2|^2 / 2 from pairs of draws. Under the square root of
                       3, further training gains nothing ("FP4 All the Way", arXiv 2505.19115)

The reference keeps the forward pass, because that is what the model computes, and isolates the errors of the
backward pass. Where the recipe's backward pass reads the values of the forward pass, so does the reference
(`of`, one scale a tensor, square blocks); where the recipe quantizes weights and inputs again, the reference
reads them unquantized. So the reference is the mean of a recipe that rounds either stochastically
(`Recipe.with_wide_backward`).

For both gradients the results of all GEMMs are kept in fp32, so that the two forward passes agree in every
bit and differ only by the roundings of the backward pass; the loss is that of the recipe in training. Each
figure is a mean over the batches with its Student interval. A recipe without random bits has no noise: its
slope is 0 and its noise ratio is infinite.

Everything is a pure function of weights, batches and seed; draws differ only in the seed of the random bits.
Delayed scales process the first batch twice before anything is measured, since a new history is empty.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch

from narrowgauge.quantization import Cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.recipes import Recipe
from narrowgauge.recipes import recipe as recipe_named
from narrowgauge.system.errors import UserError
from narrowgauge.system.json_lines import strict_json
from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.analysis.averaging import (
    GroupErrors,
    difference,
    effective_bits,
    inner_product,
    slope,
    squared_norm,
)
from narrowgauge.trainer.analysis.gradient import (
    Position,
    Progress,
    Tensors,
    counted,
    loss_and_gradient,
    loss_of,
    with_recipe,
)
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed import ModelSpec
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.training.outline import require_layers

LOSS_SCALE = 2.0**16  # the initial scale of `torch.amp.GradScaler`
USEFUL = math.sqrt(3)  # the smallest useful noise ratio
_DRAW_SEED = 0x9E3779B97F4A7C15  # difference between the seeds of two draws


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one batch; the module docstring has units and definitions."""

    loss_increase: float
    gradient_cosine: float
    gradient_bias: float
    averaging_slope: float
    effective_bits: float
    noise_ratio: float


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """The gradient of one parameter: means over the batches."""

    parameter: str
    gradient_cosine: float
    relative_error: float  #: |g - r| / |r|


@dataclass(frozen=True, slots=True)
class RecipeProbe:
    """The probe of a recipe: each of `Figures` over the batches, and the gradient of each parameter."""

    recipe: str
    figures: Mapping[str, Interval]
    layers: tuple[LayerFigures, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is probed: a model's weights at a moment of training, on some batches."""

    spec: ModelSpec  # the model; its recipe is not used
    weights: Tensors  # by parameter name, float32
    position: Position  # the step for timed rules, and the seed of the random bits
    batches: Sequence[Batch]  # the batches that every recipe processes
    device: torch.device  # the device of the passes

    def model(self, recipe: Recipe) -> Transformer:
        """The model under a recipe, at the position."""
        model = with_recipe(self.spec, recipe, self.weights, self.device)
        for steps_before in (2, 1):  # fills the histories of delayed scales and pre-scaling
            if _has_memory(recipe):
                step = self.position.step - steps_before
                loss_and_gradient(model, self.batches[0], self.position._replace(step=step))
        return model


def probe(
    subject: Subject, recipes: Sequence[Recipe], draws: int = 8, progress: Progress | None = None
) -> list[RecipeProbe]:
    """Measure the effect of each recipe on a model.

    Args:
        subject: The model and the batches.
        recipes: The recipes, in the order of the result.
        draws: Gradients of each batch under a recipe with random bits; others are computed once.
        progress: Called with a recipe's name, the batches done and their number.

    Returns:
        One object per recipe.

    Raises:
        UserError: There are fewer than two batches, or a rule of a recipe matches no layer.
    """
    assert draws >= 1
    for recipe in recipes:
        require_layers(recipe, subject.spec.model)
    if len(subject.batches) < 2:
        size, length = subject.batches[0].x_BT.shape
        raise UserError(
            f"the probe has one batch of {size} sequences of {length} tokens, and an interval needs two; set "
            "--batches to 2 or more, take a smaller --batch-size, or bring more text with --data"
        )
    wide = subject.model(recipe_named("fp32"))
    losses = [loss_of(wide, batch, subject.position) for batch in subject.batches]
    del wide
    return [_probe_one(subject, recipe, losses, draws, progress) for recipe in recipes]


def probe_json(probes: Sequence[RecipeProbe], **facts: Any) -> dict[str, Any]:
    """The probes as JSON values, after some facts about the subject; None for what is not finite."""
    recipes = {
        p.recipe: {name: value.as_json() for name, value in p.figures.items()}
        | {"layers": [strict_json(asdict(layer)) for layer in p.layers]}
        for p in probes
    }
    return {**facts, "recipes": recipes}


def _probe_one(
    subject: Subject, recipe: Recipe, wide_losses: Sequence[float], draws: int, progress: Progress | None
) -> RecipeProbe:
    variants = (recipe, recipe.with_places({"compute": "fp32"}), recipe.with_wide_backward())
    trained, narrow, reference = (subject.model(r) for r in variants)
    needed = draws if _is_random(narrow) else 1
    scale = LOSS_SCALE if recipe.compute == "fp16" else 1.0
    figures: list[Figures] = []
    sums: dict[str, list[float]] = {}
    pairs = list(zip(subject.batches, wide_losses, strict=True))
    for batch, wide_loss in counted(recipe.name, pairs, progress):
        increase = loss_of(trained, batch, subject.position) - wide_loss
        compare = partial(_compare, narrow, reference, batch, scale)
        of_batch, of_layers = _probe_batch(compare, increase, subject.position, needed)
        figures.append(of_batch)
        for name, values in of_layers.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0, 0.0]), values, strict=True)]
    count = len(subject.batches)
    layers = tuple(LayerFigures(name, c / count, e / count) for name, (c, e) in sums.items())
    intervals = {f.name: interval([getattr(one, f.name) for one in figures]) for f in fields(Figures)}
    return RecipeProbe(recipe.name, intervals, layers)


class Pair(NamedTuple):
    """A recipe's gradient g and the reference r, with |g|^2, |r|^2 and g.r."""

    g: Tensors
    r: Tensors

    @property
    def along(self) -> float:
        """g.r / r.r"""
        return _ratio(inner_product(self.g, self.r), squared_norm(self.r))

    @property
    def cosine(self) -> float:
        """g.r / (|g| |r|)"""
        return _ratio(inner_product(self.g, self.r), math.sqrt(squared_norm(self.g) * squared_norm(self.r)))

    @property
    def relative_error(self) -> float:
        """|g - r| / |r|"""
        return math.sqrt(_ratio(squared_norm(difference(self.g, self.r)), squared_norm(self.r)))


def _compare(
    narrow: Transformer, reference: Transformer, batch: Batch, loss_scale: float, position: Position
) -> Pair:
    """Both gradients of a batch, with the same random bits in the forward pass."""
    _, g = loss_and_gradient(narrow, batch, position, loss_scale)
    _, r = loss_and_gradient(reference, batch, position)
    return Pair(g, r)


def _probe_batch(
    compare: Callable[[Position], Pair], loss_increase: float, position: Position, draws: int
) -> tuple[Figures, dict[str, tuple[float, float]]]:
    """The figures of one batch, and (cosine, relative error) of each parameter in the first draw."""
    first = pair = compare(position)
    errors, along = GroupErrors(), list[float]()
    for draw in range(draws):
        if draw:
            pair = compare(position._replace(seed=(position.seed + draw * _DRAW_SEED) % 2**63))
        errors.add(difference(pair.g, pair.r))
        along.append(pair.along)
    squared = [_ratio(e, squared_norm(first.r)) for e in errors.squared_errors()]
    bits = [effective_bits(e) for e in squared]
    # |g_1 - g_2|^2 = 2 (|e_1|^2 + |e_2|^2) - |e_1 + e_2|^2, as means over the pairs
    noise = max(2 * squared[0] - 2 * squared[1], 0.0) if draws > 1 else 0.0
    figures = Figures(
        loss_increase,
        first.cosine,
        math.fsum(along) / draws - 1,
        slope(bits) if draws > 1 else 0.0,
        bits[0],
        math.inf if noise == 0 else noise**-0.5,
    )
    layers = (Pair({"": first.g[name]}, {"": first.r[name]}) for name in first.g)
    return figures, {name: (p.cosine, p.relative_error) for name, p in zip(first.g, layers, strict=True)}


def _ratio(a: float, b: float) -> float:
    """a / b; 0 / 0 is NaN."""
    return a / b if b else math.nan


def _is_random(model: Transformer) -> bool:
    return any(getattr(module, "is_random", False) for module in model.modules())


def _has_memory(recipe: Recipe) -> bool:
    """Whether a step under a recipe depends on earlier steps."""
    operands = [*recipe.casts.values(), *(c for rule in recipe.rules for c in rule.casts.values())]
    return any(map(has_memory, filter(None, (*operands, *recipe.state.values()))))


def has_memory(cast: Cast) -> bool:
    """Whether the result of a cast depends on earlier steps; assumed for a key that is not listed."""
    return bool(cast.unsupported[Consumer.MEMORYLESS])

"""The cost of narrowing each layer and place alone.

Everything is in fp32 except one place of one layer. The two passes affect different quantities, so there are
two lists, each with its unit:

    fprop.x, fprop.w                       nats: the loss with it narrow - the loss
    dgrad.dy, dgrad.w, wgrad.dy, wgrad.x   share: the part lost of what a step removes from the loss

The share is a squared sine: how far the narrow place turns the gradient, in the optimizer's metric
(`update`). `forks` measures both in nats, by training. Places of attention and the residual stream stay in
fp32: only linear layers have a cost here. Each cost is a mean over the batches with its Student interval.

`forward_costs` measures, with one forward pass for each layer, place and batch. A second-order estimate was
right for small errors but off by several times for the layer that matters, whose error is large.

`backward_costs` predicts all shares of a batch from one forward and one backward pass of the fp32 model and
some passes through single blocks; `exact_backward_costs` measures them, with two passes for each. Legend: M
tokens, N outputs, K inputs; e the error Q(x) - x of an operand.

**wgrad places** change only the gradient of the layer's weight, by e_MN.T @ x_MK or dy_MN.T @ e_MK: exact.

**dgrad places** change the gradient of the layer's input by d_MK, which propagates to all parameters before
it. d is passed exactly through the layer's block. At the block's input it turns the gradient of the residual
stream by an angle, and the gradient of each parameter of the earlier blocks is assumed to turn by the same
angle.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.nn import convert
from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES
from narrowgauge.recipes import recipe as recipe_named
from narrowgauge.system.errors import UserError
from narrowgauge.system.json_lines import strict_json
from narrowgauge.system.t_interval import interval
from narrowgauge.trainer.analysis.forks import only_in
from narrowgauge.trainer.analysis.gradient import Progress, counted, linear_layers, loss_and_gradient, loss_of
from narrowgauge.trainer.analysis.linear_graph import LinearGraph
from narrowgauge.trainer.analysis.probe import Subject
from narrowgauge.trainer.analysis.rank_correlation import rank_correlation
from narrowgauge.trainer.analysis.update import StepMetric, lost, progress
from narrowgauge.trainer.models import Transformer

Key = tuple[str, str]
NATS, SHARE = "nats", "share"  # of the loss; of a step's progress
_FORWARD = tuple(place for place in GEMM_PLACES if place.startswith("fprop."))
_BACKWARD = tuple(place for place in GEMM_PLACES if place not in _FORWARD)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one place of one layer, narrowed alone: a mean over batches or forks, with 95 % limits.

    `is_forked`: whether forks measured it, which gives nats for each place.
    """

    layer: str
    place: str
    cost: float
    low: float = math.nan
    high: float = math.nan
    is_forked: bool = False

    @property
    def name(self) -> str:
        """LAYER.PLACE"""
        return f"{self.layer}.{self.place}"

    @property
    def unit(self) -> str:
        """`NATS` or `SHARE`."""
        return NATS if self.is_forked or self.place in _FORWARD else SHARE


def forward_costs(subject: Subject, cast: Cast, show: Progress | None = None) -> list[Cost]:
    """Measure how much each layer and place of the forward pass, narrowed alone to a cast, adds to the loss.

    Args:
        subject: The model and the batches.
        cast: The cast that each place is narrowed to.
        show: Called with "forward", the places done and their number.

    Returns:
        One cost for each layer and place, layers in the order of the model.

    Raises:
        UserError: The model has experts.
    """
    model = _wide_model(subject)
    wide = [loss_of(model, batch, subject.position) for batch in subject.batches]

    def cost(layer: str, place: str) -> list[float]:
        convert(model, only_in(recipe_named("fp32"), layer, {place: cast}))
        return [
            loss_of(model, batch, subject.position) - loss
            for batch, loss in zip(subject.batches, wide, strict=True)
        ]

    return _each("forward", model, _FORWARD, cost, show)


def backward_costs(
    subject: Subject, cast: Cast, metric: StepMetric, show: Progress | None = None
) -> list[Cost]:
    """Estimate the share of a step's progress that each layer and place of the backward pass takes.

    Args:
        subject: The model and the batches.
        cast: The cast that each place is narrowed to.
        metric: How the optimizer weighs a gradient.
        show: Called with "backward", the batches done and their number.

    Returns:
        One cost for each layer and place, layers in the order of the model.

    Raises:
        UserError: The model has experts.
    """
    model = _wide_model(subject)
    found: dict[Key, list[float]] = {}
    for batch in counted("backward", subject.batches, show):
        for key, share in LinearGraph(model, batch).shares(cast, metric).items():
            found.setdefault(key, []).append(share)
    return [_cost(key, shares) for key, shares in found.items()]


def exact_backward_costs(
    subject: Subject, cast: Cast, metric: StepMetric, show: Progress | None = None
) -> list[Cost]:
    """Measure what `backward_costs` estimates, with separate passes for each place."""
    model = _wide_model(subject)
    wide = [loss_and_gradient(model, batch, subject.position)[1] for batch in subject.batches]

    def cost(layer: str, place: str) -> list[float]:
        convert(model, only_in(recipe_named("fp32"), layer, {place: cast}))
        shares = []
        for batch, gradient in zip(subject.batches, wide, strict=True):
            _, changed = loss_and_gradient(model, batch, subject.position)
            factors = metric.factors(gradient)
            error = {name: changed[name] - g for name, g in gradient.items()}
            gained = math.fsum(progress(factors, gradient).values())
            shares.append(lost(factors, gradient, error) / gained)
        return shares

    return _each("exact", model, _BACKWARD, cost, show)


def relative_errors(subject: Subject, cast: Cast) -> dict[Key, float]:
    """The relative squared quantization error of each GEMM's operands in a cast, on the first batch."""
    return LinearGraph(_wide_model(subject), subject.batches[0]).relative_errors(cast)


def worst(costs: Sequence[Cost]) -> list[Cost]:
    """The four places that cost the most, the worst first; all costs must have the same unit."""
    return sorted(costs, key=lambda cost: -cost.cost)[:4]


def sensitivity_json(
    forward: Sequence[Cost], backward: Sequence[Cost], measured: Sequence[Cost] = (), **facts: Any
) -> dict[str, Any]:
    """The costs as JSON values, after some facts; a measured cost takes the place of a quick one.

    "worst" lists places of the forward pass, "worst_backward" places of the backward pass. A place that was
    measured also has its "estimate", and "rank_correlation" compares the two over the backward pass,
    "rank_correlation_forward" over the forward pass. None stands for values that are not finite, and for a
    correlation if all costs are equal.
    """
    by_name = {cost.name: cost for cost in measured}
    estimates = {c.name: c.cost for c in (*forward, *backward) if c.name in by_name}
    layers = []
    for c in in_order(forward, backward, measured):
        line = {"layer": c.layer, "place": c.place, "cost": c.cost, "low": c.low, "high": c.high}
        line |= {"unit": c.unit} | ({"estimate": estimates[c.name]} if c.name in estimates else {})
        layers.append(strict_json(line))
    found = {**facts, "layers": layers}
    for end, quick in (("", forward), ("_backward", backward)):
        found[f"worst{end}"] = [cost.name for cost in worst([by_name.get(c.name, c) for c in quick])]
    for end, quick in (("", backward), ("_forward", forward)):
        if pairs := [(c.cost, by_name[c.name].cost) for c in quick if c.name in by_name]:
            found[f"rank_correlation{end}"] = rank_correlation(*zip(*pairs, strict=True))
    return strict_json(found)


def in_order(forward: Sequence[Cost], backward: Sequence[Cost], measured: Sequence[Cost] = ()) -> list[Cost]:
    """One cost of each place, measured if it was, in the order of the model's layers and places."""
    by_key = {(c.layer, c.place): c for c in (*forward, *backward, *measured)}
    layers = dict.fromkeys(c.layer for c in forward)
    return [by_key[layer, place] for layer in layers for place in GEMM_PLACES]


def _wide_model(subject: Subject) -> Transformer:
    """The model with everything in fp32.

    UserError: It has experts, whose layers process other tokens from pass to pass.
    """
    experts = subject.spec.model.experts
    if experts:
        raise UserError(
            f"model.experts = {experts}: sensitivity and search weigh a layer by GEMMs with all tokens, "
            "and an expert has some; compare recipes of this model with probe"
        )
    return subject.model(recipe_named("fp32"))


def _each(
    task: str,
    model: Transformer,
    places: Sequence[str],
    cost: Callable[[str, str], list[float]],
    show: Progress | None,
) -> list[Cost]:
    """The cost of each layer and place from its values on each batch."""
    keys = [(name, place) for name in linear_layers(model) for place in places]
    return [_cost(key, cost(*key)) for key in counted(task, keys, show)]


def _cost(key: Key, values: Sequence[float]) -> Cost:
    found = interval(values)
    return Cost(*key, found.mean, found.low, found.high)

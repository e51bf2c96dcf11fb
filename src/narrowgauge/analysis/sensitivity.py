"""What does narrowing each layer and place alone cost?

Everything is wide (fp32) but one place of one layer. Its cost has no unit:

    fprop.x, fprop.w                       (loss with it narrow - loss) / loss
    dgrad.dy, dgrad.w, wgrad.dy, wgrad.x   |u(g') - u(g)|^2 / |u(g)|^2

Places of attention and the residual stream stay wide: only linear layers have a cost here. Let g be the
gradient, g' the gradient with a place narrow, and u(g) the direction of the optimizer's next step
(`update`). The first says what the forward pass loses, the second how far the step moves: the two quantities
that SNIP adds (arXiv 2602.01410). Each is a mean over the batches.

`exact_costs` measures this, with one pass for each layer and place. `estimate_costs` predicts all of them
from one forward pass and two backward passes of the wide model, and some passes through single blocks.
Legend: M tokens, N outputs, K inputs; Q(x) the narrow numbers of x, e its error Q(x) - x.

**Forward places** change the output of the layer by d_MN, say e_MK @ w_NK.T. To second order in d the loss
changes by

    sum over tokens of G.d  +  1/2 sum over tokens of (F.d)^2,

with G the gradient of the loss with respect to the output. The second term takes the Fisher matrix for the
Hessian, as ModelOpt's `auto_quantize` does: F is the gradient for targets that are drawn from the model's own
predictions, and errors of different tokens are taken as independent.

**wgrad places** change the gradient of the layer's weight only, by e_MN.T @ x_MK or dy_MN.T @ e_MK: exact.

**dgrad places** change the gradient of the layer's input by d_MK, which goes on to all parameters before it.
d is passed through the layer's own block exactly. At the block's input it is a share s = |d|^2 / |gradient|^2
of the gradient of the residual stream, and each parameter of the blocks before is taken to have the share s
of error in its gradient too, in a random direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.analysis.gradient import linear_layers, loss_and_gradient, loss_of
from narrowgauge.analysis.linear_graph import LinearGraph
from narrowgauge.analysis.probe import Subject
from narrowgauge.analysis.rank_correlation import rank_correlation
from narrowgauge.analysis.update import UpdateRule
from narrowgauge.json_lines import strict_json
from narrowgauge.nn import convert
from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES, Recipe, Rule
from narrowgauge.recipes import recipe as recipe_named

Progress = Callable[[str, int, int], None]
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one place of one layer, narrowed alone; it has no unit (see the module's text)."""

    layer: str
    place: str
    cost: float

    @property
    def name(self) -> str:
        """LAYER.PLACE"""
        return f"{self.layer}.{self.place}"


def estimate_costs(
    subject: Subject, cast: Cast, rule: UpdateRule, progress: Progress | None = None
) -> list[Cost]:
    """Predict the cost of every layer and place.

    Args:
        subject: The model and the batches.
        cast: The cast that each place is narrowed to.
        rule: The optimizer's next step.
        progress: Called with "estimate", the batches done and their number.

    Returns:
        One cost for each layer and place, layers in the order of the model.
    """
    model = subject.model(recipe_named("fp32"))
    totals: dict[Key, float] = {}
    for number, batch in enumerate(subject.batches):
        if progress is not None:
            progress("estimate", number, len(subject.batches))
        graph = LinearGraph(model, batch, subject.position.seed + number)
        for key, cost in graph.costs(cast, rule).items():
            totals[key] = totals.get(key, 0.0) + cost / len(subject.batches)
    if progress is not None:
        progress("estimate", len(subject.batches), len(subject.batches))
    return [Cost(layer, place, cost) for (layer, place), cost in totals.items()]


def exact_costs(
    subject: Subject, cast: Cast, rule: UpdateRule, progress: Progress | None = None
) -> list[Cost]:
    """Measure the cost of every layer and place, each alone; the arguments are those of `estimate_costs`."""
    model = subject.model(recipe_named("fp32"))
    keys = [(name, place) for name in linear_layers(model) for place in GEMM_PLACES]
    wide = [loss_and_gradient(model, batch, subject.position) for batch in subject.batches]
    directions = [{n: rule.direction(n, g) for n, g in gradient.items()} for _, gradient in wide]
    sizes = [sum(u.double().square().sum().item() for u in d.values()) for d in directions]
    costs = []
    for number, (layer, place) in enumerate(keys):
        if progress is not None:
            progress("exact", number, len(keys))
        convert(model, _alone(layer, place, cast))
        total = 0.0
        for batch, (loss, gradient), size in zip(subject.batches, wide, sizes, strict=True):
            if place.startswith("fprop."):
                total += (loss_of(model, batch, subject.position) - loss) / loss
            else:
                _, changed = loss_and_gradient(model, batch, subject.position)
                moved = (rule.moved(n, g, changed[n] - g) for n, g in gradient.items())
                total += sum(moved) / size
        costs.append(Cost(layer, place, total / len(subject.batches)))
    if progress is not None:
        progress("exact", len(keys), len(keys))
    return costs


def relative_errors(subject: Subject, cast: Cast) -> dict[Key, float]:
    """The relative squared quantization error of each GEMM's operands in a cast, on the first batch."""
    model = subject.model(recipe_named("fp32"))
    return LinearGraph(model, subject.batches[0], subject.position.seed).relative_errors(cast)


def worst(costs: Sequence[Cost], count: int = 4) -> list[Cost]:
    """The places that cost most, the worst first."""
    return sorted(costs, key=lambda cost: -cost.cost)[:count]


def sensitivity_json(estimated: Sequence[Cost], exact: Sequence[Cost] | None, **facts: Any) -> dict[str, Any]:
    """The costs as JSON values, after some facts: the measured ones where there are any.

    With both, each layer and place has its "estimate" beside it, and "rank_correlation" compares the two.
    None stands for what is not finite, and for the correlation where all costs are equal.
    """
    layers = [{"layer": c.layer, "place": c.place, "cost": c.cost} for c in exact or estimated]
    found = {**facts, "layers": layers, "worst": [cost.name for cost in worst(exact or estimated)]}
    if exact is not None:
        for line, cost in zip(layers, estimated, strict=True):
            line["estimate"] = cost.cost
        orders = ([cost.cost for cost in costs] for costs in (estimated, exact))
        found["rank_correlation"] = rank_correlation(*orders)
    return strict_json(found | {"layers": [strict_json(line) for line in layers]})


def _alone(layer: str, place: str, cast: Cast) -> Recipe:
    """A recipe in which everything is fp32 but one place of one layer."""
    wide = recipe_named("fp32")
    return replace(wide, name=f"{layer}.{place}", rules=(Rule(casts={place: cast}, modules=(layer,)),))

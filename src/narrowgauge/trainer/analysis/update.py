"""The share of a step's progress that an error of the gradient takes.

A step moves a weight tensor by -a P g: g is its gradient, P a positive factor for each element, a the step
size. Where the curvature of the loss is proportional to 1 / P, as a step by P assumes, a step along P g'
removes at its best length

    (g.Pg')^2 / (2 c g'.Pg')

from the loss, with the same c for every g'. So the gradient g' = g + e in place of g loses the share

    1 - (g.Pg')^2 / (g.Pg g'.Pg')

of a tensor's progress: the squared sine of the angle by which the step turns. A gradient that is only too
short costs nothing, because the optimizer sets the length: Adam divides by the size of the gradients it gets.
The share of the whole step is the mean over the tensors, weighted by g.Pg. It is dimensionless and
independent of the learning rate. P is that of the optimizer that trained the model, or one that depends only
on the model:

    AdamW     1 / (sqrt(v') + eps),  v' = (beta2 v + (1 - beta2) g^2) / (1 - beta2^(t+1)),
              with v of the checkpoint after t steps
    others    rms(w) / rms(g) of each row: an update proportional to the weights, like Adafactor's

The second is used for a model of another program, and for Muon. With it the share is invariant when rows
of a tensor are multiplied by a number and the next tensor is divided by it, which leaves the model's
function unchanged. With P = 1 it is not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """AdamW's v of one parameter in float32, and the number of steps."""

    v: torch.Tensor
    steps: int


@dataclass(frozen=True, slots=True)
class StepMetric:
    """The factors P by which an optimizer weighs the elements of a gradient."""

    weights: Tensors  # each parameter's weights, by name
    # AdamW's second moments; rows of parameters without one are weighted by their size
    moments: Mapping[str, SecondMoment] = field(default_factory=dict)
    beta2: float = 0.95  # AdamW's second beta
    eps: float = 1e-8  # AdamW's eps

    def factors(self, gradient: Tensors) -> dict[str, torch.Tensor]:
        """P of each parameter at a gradient, in shapes that broadcast against it."""
        return {name: self._factor(name, g) for name, g in gradient.items()}

    def _factor(self, name: str, g: torch.Tensor) -> torch.Tensor:
        state = self.moments.get(name)
        if state is None:
            size, weight = (t.square().mean(-1, keepdim=True).sqrt() for t in (g, self.weights[name]))
            return (weight.to(g.device) / size).where(size > 0, torch.zeros_like(size))
        v = self.beta2 * state.v + (1 - self.beta2) * g.square()
        return 1 / ((v / (1 - self.beta2 ** (state.steps + 1))).sqrt() + self.eps)


def progress(factors: Tensors, gradient: Tensors) -> dict[str, float]:
    """g.Pg of each tensor, added in float64."""
    return {name: _product(factors[name], g, g) for name, g in gradient.items()}


def lost(factors: Tensors, gradient: Tensors, errors: Tensors) -> float:
    """The part of the sum of `progress` that errors in some tensors' gradients cost."""
    total = 0.0
    for name, e in errors.items():
        p, g = factors[name], gradient[name]
        total += turned(_product(p, g, g), _product(p, g, e), _product(p, e, e))
    return total


def turned(gg: float, ge: float, ee: float) -> float:
    """g.Pg times the squared sine of the angle between g and g + e, from g.Pg, g.Pe and e.Pe."""
    narrow = gg + 2 * ge + ee
    return max(0.0, gg * ee - ge * ge) / narrow if narrow > 0 else gg


def _product(p: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    return (p * a).double().mul_(b).sum().item()

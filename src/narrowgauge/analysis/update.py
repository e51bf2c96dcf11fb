"""How far an optimizer's step moves when a gradient changes.

AdamW divides each element of the gradient by the root of its second moment, so an error counts where the
gradient is small as much as where it is large, and a gradient's norm says nothing of it. For a gradient g,
with the moments m and v of the checkpoint and t steps done, the direction of the next step is

    u(g) = m' / (sqrt(v') + eps),    m' = (beta1 m + (1 - beta1) g) / (1 - beta1^(t+1)),
                                     v' = (beta2 v + (1 - beta2) g^2) / (1 - beta2^(t+1))

The learning rate and the weight decay do not depend on g, and are left out. Where there are no such moments
(a model of another program, Muon), u(g) = g.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimizer's state of one parameter: m and v in float32, and the steps done."""

    m: torch.Tensor
    v: torch.Tensor
    steps: int


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The direction in which AdamW moves the parameters; plain descent for those without moments."""

    moments: Mapping[str, Moments]
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def direction(self, name: str, g: torch.Tensor) -> torch.Tensor:
        """u(g) of a parameter; the shape is that of g, float32."""
        state = self.moments.get(name)
        if state is None:
            return g
        beta1, beta2 = self.betas
        m = (beta1 * state.m + (1 - beta1) * g) / (1 - beta1 ** (state.steps + 1))
        v = (beta2 * state.v + (1 - beta2) * g.square()) / (1 - beta2 ** (state.steps + 1))
        return m / (v.sqrt() + self.eps)

    def moved(self, name: str, g: torch.Tensor, error: torch.Tensor) -> float:
        """|u(g + error) - u(g)|^2 of a parameter, added in float64."""
        difference = self.direction(name, g + error) - self.direction(name, g)
        return difference.double().square().sum().item()

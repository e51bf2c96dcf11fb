"""Observers of a layer's operands and matmuls: the interface that gauges and probes implement."""

from dataclasses import dataclass
from typing import Protocol

import torch

from narrowgauge.quantization import Cast, QuantContext

ROWS = 64  # of a matmul, that an observer computes again in float32


def evenly(t: torch.Tensor) -> torch.Tensor:
    """A view of `ROWS` rows of a matrix, evenly spaced from the first on; of all if it has fewer."""
    return t[:: max(1, t.shape[0] // ROWS)][:ROWS]


@dataclass(frozen=True, slots=True)
class Observation:
    """A matrix, and what a GEMM sees of it.

    Attributes:
        place: The place in the recipe, such as "fprop.x".
        x: The matrix as it came, in high precision.
        operand: What the GEMM multiplies.
        scale: A 0-dim float32 scale that belongs to the operand, or None for 1.
        cast: The cast of the place.
        axis: The axis that the GEMM contracts.
        context: The context under which the cast was applied.
    """

    place: str
    x: torch.Tensor
    operand: torch.Tensor
    scale: torch.Tensor | None
    cast: Cast
    axis: int
    context: QuantContext

    @property
    def seen(self) -> torch.Tensor:
        """The numbers that the GEMM sees, scale applied."""
        return self.operand if self.scale is None else self.operand.float() * self.scale


class Observer(Protocol):
    """What can be attached to a layer, to be shown each operand and each product of its three GEMMs."""

    def operand(self, observation: Observation) -> None:
        """Observe an operand."""

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Observe a product and its factors in high precision; R is M, or the rows that `evenly` picks."""

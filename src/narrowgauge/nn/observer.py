"""Observers of a layer's operands and matmuls: the interface that gauges and probes implement."""

from dataclasses import dataclass
from typing import Protocol

import torch

from narrowgauge.quantization import Cast, QuantContext

ROWS = 64  # rows of a matmul that an observer recomputes in float32


def evenly(t: torch.Tensor) -> torch.Tensor:
    """A view of `ROWS` evenly spaced rows of a matrix, starting with the first; of all if it has fewer."""
    return t[:: max(1, t.shape[0] // ROWS)][:ROWS]


@dataclass(frozen=True, slots=True)
class Observation:
    """A matrix, and the operand that a GEMM sees.

    Attributes:
        place: The place in the recipe, such as "fprop.x".
        x: The matrix as it came, in high precision.
        operand: The GEMM's operand.
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
        """The values that the GEMM sees, scale applied."""
        return self.operand if self.scale is None else self.operand.float() * self.scale


class Observer(Protocol):
    """The interface of a layer observer: it sees each operand and result of the three GEMMs."""

    def operand(self, observation: Observation) -> None:
        """Observe an operand."""

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Observe a result and its operands in high precision; R is M, or the rows that `evenly` picks."""

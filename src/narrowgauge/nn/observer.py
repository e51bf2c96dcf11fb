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
    """A matrix, and the operand that a GEMM sees."""

    place: str  # the place in the recipe, such as "fprop.x"
    x: torch.Tensor  # the matrix as it came, in high precision
    operand: torch.Tensor  # the GEMM's operand
    scale: torch.Tensor | None  # a 0-dim float32 scale that belongs to the operand, or None for 1
    cast: Cast  # of the place
    axis: int  # the axis that the GEMM contracts
    context: QuantContext  # the context under which the cast was applied

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

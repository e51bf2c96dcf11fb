"""The budget of a search: the share of all FLOPs in formats of at most 4 bits, X to X + 0.05.

It is a sum over GEMMs, each of which has one format for both operands. It is over FLOPs, not over weights,
since a GEMM of a training step has two operands, and only one of the six places of a layer is stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.quantization import Cast
from narrowgauge.system.errors import UserError

NARROW_BITS = 4
TOLERANCE = 0.05
EPSILON = 1e-9  # sums of shares are not exact


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of an assignment."""

    option: str  # the option and its value, for errors
    words: str  # the unit of an amount, such as "of the FLOPs in 4 bits"
    amounts: Mapping[str, float]  # the amount of a GEMM that does all FLOPs, by the name of its format
    low: float  # the smallest amount
    high: float  # the largest amount

    def holds(self, amount: float) -> bool:
        """Whether an amount lies in the range."""
        return self.low - EPSILON <= amount <= self.high + EPSILON


def flops_budget(casts: Mapping[str, Cast], share: float) -> Budget:
    """The budget of a share of FLOPs in formats of at most 4 bits.

    Raises:
        UserError: No format has at most 4 bits, or the share is out of range.
    """
    if all(cast.element.bits > NARROW_BITS for cast in casts.values()):
        raise UserError(
            f"--formats {','.join(casts)}: none has {NARROW_BITS} bits or fewer, and the budget is a share "
            "of FLOPs in such formats; add one, such as mxfp4"
        )
    if not 0 <= share <= 1:
        raise UserError(f"--budget {share} must be a share from 0 to 1, such as 0.75")
    amounts = {name: float(cast.element.bits <= NARROW_BITS) for name, cast in casts.items()}
    return Budget(f"--budget {share}", "of the FLOPs in 4 bits", amounts, share, min(1.0, share + TOLERANCE))

"""How elements are rounded to the grid of their format, and the gradient through the rounding of a weight.

The straight-through estimator treats rounding as having slope 1 everywhere. The differentiable estimator for
FP4 (arXiv 2501.17116) approximates rounding on the interval of width d between two neighbours of the grid by

    f(t) = d/2 (1 + sign(u) |u|^(1/k)),   u = 2 t / d - 1      t from the lower neighbour

and multiplies the weight's gradient by its slope |u|^(1/k - 1) / k. The slope is 1/k on the grid, rises to
infinity half way between two points, where rounding jumps, and is limited by a cap
(`block_scales.estimator_slope`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from narrowgauge.formats import RANDOM_BITS, ROUNDINGS
from narrowgauge.quantization.stages import Names, Rules, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding(Stage):
    """The rounding of elements.

    Attributes:
        mode: A name of `formats.ROUNDINGS`.
        random_bits: Random bits per element of stochastic rounding: 24 is unbiased, 8 matches sm_100.
    """

    mode: str = "nearest-even"
    random_bits: int = RANDOM_BITS
    KEYS: ClassVar[Mapping[str, str]] = {"rounding": "mode", "random_bits": "random_bits"}
    NAMES: ClassVar[Names] = {"rounding": ("mode", ROUNDINGS)}

    def rules(self) -> Rules:
        """The rules of its keys."""
        return [("random_bits", 1 <= self.random_bits <= RANDOM_BITS, f"it must lie in 1 to {RANDOM_BITS}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator(Stage):
    """The differentiable gradient estimator of a weight.

    Attributes:
        k: The k of the formula above; 0 for the straight-through estimator.
        cap: The largest slope.
    """

    k: float = 0.0
    cap: float = 3.0
    KEYS: ClassVar[Mapping[str, str]] = {"estimator_k": "k", "estimator_cap": "cap"}

    def rules(self) -> Rules:
        """The rules of its keys."""
        return [
            ("estimator_k", self.k == 0 or self.k >= 1, "it must be 0, or at least 1"),
            ("estimator_cap", self.cap > 0, "it must be positive"),
        ]

"""What is forecast and what was observed: records of a recipe's GEMMs at a size and a length."""

from dataclasses import dataclass, replace

FORWARD, BACKWARD = "forward", "backward"
UNIT_PARAMS, UNIT_TOKENS = 1e8, 1e10  # where kappa is the gap: 100 tokens per parameter
NEW = "a family without points"


@dataclass(frozen=True, slots=True)
class Part:
    """One GEMM of a recipe: its name, the casts of its operands, and their noise.

    Attributes:
        gemm: "fprop", "dgrad" or "wgrad".
        casts: The casts of both operands, as text; equal texts share a coefficient.
        noise: The noise of both operands together, over their power (`noise`); None if it is unknown.
    """

    gemm: str
    casts: str
    noise: float | None = None

    @property
    def side(self) -> str:
        """The pass that the GEMM belongs to."""
        return FORWARD if self.gemm == "fprop" else BACKWARD


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe as its parts, at a size and a length.

    Attributes:
        recipe: Its name; settings of one name share an effect.
        parts: The GEMMs that are narrow; none for a reference.
        params: Parameters, without embeddings.
        tokens: Tokens of training.
        family: The laboratory, architecture and corpus; `NEW` for one without points.
        tail: The share of blocks that stay wide.
        finishes: Whether the forward pass is wide once the learning rate falls.
    """

    recipe: str
    parts: tuple[Part, ...]
    params: float
    tokens: float
    family: str = NEW
    tail: float = 0.0
    finishes: bool = False

    @property
    def tokens_per_param(self) -> float:
        """Tokens of training for each parameter."""
        return self.tokens / self.params

    def at(self, params: float, tokens: float) -> "Setting":
        """The same recipe at another size and length."""
        return replace(self, params=params, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Observed:
    """A gap in percent that was measured at a setting, as the mean over some pairs of runs.

    Attributes:
        setting: The setting.
        gap: The gap in percent of the loss of the reference.
        seeds: How many pairs it is the mean of.
        error: The deviation of `gap` in percent where its source states one.
    """

    setting: Setting
    gap: float
    seeds: int = 1
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """Evidence on one part of a recipe in addition to the points.

    Attributes:
        part: The part.
        recipe: The recipe.
        shift: ln kappa beyond what the noise of its casts makes it.
        deviation: The deviation of that.
    """

    part: Part
    recipe: str
    shift: float
    deviation: float

"""What is forecast and what was observed: records of a recipe's GEMMs at a size and a length."""

from dataclasses import dataclass, replace

FORWARD, BACKWARD = "forward", "backward"
UNIT_PARAMS, UNIT_TOKENS = 1e8, 1e10  # where kappa is the gap: 100 tokens per parameter
NEW = "a family without points"


@dataclass(frozen=True, slots=True)
class Part:
    """One GEMM of a recipe: its name, the casts of its operands, and their noise."""

    gemm: str  # "fprop", "dgrad" or "wgrad"
    casts: str  # the casts of both operands, as text; equal texts share a coefficient
    # the noise of both operands together, over their power (`noise`); None if it is unknown
    noise: float | None = None

    @property
    def side(self) -> str:
        """The pass that the GEMM belongs to."""
        return FORWARD if self.gemm == "fprop" else BACKWARD


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe as its parts, at a size and a length."""

    recipe: str  # its name; settings of one name share an effect
    parts: tuple[Part, ...]  # the GEMMs that are narrow; none for a reference
    params: float  # parameters, without embeddings
    tokens: float  # tokens of training
    family: str = NEW  # the laboratory, architecture and corpus; `NEW` for one without points
    tail: float = 0.0  # the share of blocks that stay wide
    finishes: bool = False  # whether the forward pass is wide once the learning rate falls

    @property
    def tokens_per_param(self) -> float:
        """Tokens of training for each parameter."""
        return self.tokens / self.params

    def at(self, params: float, tokens: float) -> "Setting":
        """The same recipe at another size and length."""
        return replace(self, params=params, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Observed:
    """A gap in percent that was measured at a setting, as the mean over some pairs of runs."""

    setting: Setting
    gap: float  # the gap in percent of the loss of the reference
    seeds: int = 1  # how many pairs it is the mean of
    error: float | None = None  # the deviation of `gap` in percent where its source states one


@dataclass(frozen=True, slots=True)
class Hint:
    """Evidence on one part of a recipe in addition to the points."""

    part: Part
    recipe: str
    shift: float  # ln kappa beyond what the noise of its casts makes it
    deviation: float  # the deviation of that

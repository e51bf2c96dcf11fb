"""What runs, `probe`, `sensitivity` and `compare` leave as JSON; a file or event of another form is none.

    probe.json          the figures of each recipe
    sensitivity.json    the cost of each layer and place
    comparison.json     what a comparison is about to train, written before its first run

    events of metrics.jsonl: the memory and the layers of the first step, the time of a step (`--profile`)

The runs of a comparison are in the order of training, the reference's first. A reader learns from it which
runs are still to come; what has happened is in the run directories.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

COMPARISON = "comparison.json"
Stored = TypeVar("Stored", bound=BaseModel)
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Figure(BaseModel):
    """A mean and its interval; None for values that are not finite."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None


class Probe(BaseModel):
    """The figures of each recipe."""

    step: int = 0
    recipes: dict[str, dict[str, Figure | list[Any] | None]] = Field(min_length=1)

    def mean(self, recipe: str, key: str) -> float | None:
        """The mean of a figure; None if there is none."""
        found = self.recipes.get(recipe, {}).get(key)
        return found.mean if isinstance(found, Figure) else None


class Cost(BaseModel):
    """What one place of one layer costs, in a unit; None if it is not finite."""

    layer: str
    place: str
    cost: float | None = None
    unit: str


class Costs(BaseModel):
    """The costs in a cast, the worst places of each pass, and how they were measured, if by training."""

    step: int = 0
    to: str = ""
    layers: list[Cost] = Field(min_length=1)
    worst: list[str] = []
    worst_backward: list[str] = []
    forks: str = ""


class Peak(BaseModel):
    """The most bytes at once."""

    peak: int


class Memory(Peak):
    """The bytes of the first step by class, those on the host, and what was expected."""

    bytes: dict[str, int]
    host_bytes: dict[str, int]
    parameters: Annotated[int, Field(gt=0)]
    expected: Peak


class StepTime(BaseModel):
    """Milliseconds of a step by class; a floor is the least time that the machine's peak rates allow.

    A class without a floor (waiting) is pure overhead.
    """

    ms: dict[str, _Time] = Field(min_length=1)
    floor_ms: dict[str, _Time] = {}


class Layer(BaseModel):
    """What a linear layer computed in, how often, and whether a gradient reached it; None if unknown."""

    layer: str
    cast: str | None = None
    calls: int | None = None
    gradient: bool | None = None
    note: str | None = None


class Audit(BaseModel):
    """The linear layers in the first step."""

    layers: list[Layer] = Field(min_length=1)


def _own_name(name: Any) -> Any:
    """The name of a directory in the folder, never a path that leads elsewhere."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(name)
    return name


class PlannedRun(BaseModel):
    """The run of one arm, seed and rung."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, BeforeValidator(_own_name)]  # its directory, below that of the experiment
    arm: str  # its variant
    seed: int  # its seed; runs of one seed have the same initial weights and tokens
    rung: int = 1  # the index of the rung, from 1; 0 for a fork, whose steps the arms of a seed share
    steps: int
    tokens: int  # the number of tokens processed by its end

    @property
    def key(self) -> tuple[str, int, int]:
        """Its arm, seed and rung."""
        return self.arm, self.seed, self.rung


class PlannedComparison(BaseModel):
    """A comparison as it was started."""

    model_config = ConfigDict(frozen=True)

    command: str = ""  # its command line; "" if it was started from Python
    reference: str  # the arm that the others are compared with
    family: tuple[str, ...]  # the arms that are compared, without the reference and controls
    seeds: tuple[int, ...]  # the seeds of each arm
    parameters: int  # parameters in linear layers, to which tokens are related
    is_quiet: bool = False  # whether no warm-up is expected to spike; False in the file of an older version
    rows: str = ""  # the file of results of a measured experiment, from its folder; "" for none
    runs: tuple[PlannedRun, ...]  # in the order of training: the forks, then each trunk with its branches

    @property
    def rungs(self) -> int:
        """The number of rungs."""
        return max((run.rung for run in self.runs), default=0)


def read_stored(kind: type[Stored], path: Path) -> Stored | None:
    """What a file holds; None if it is missing, damaged or of another form."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return None

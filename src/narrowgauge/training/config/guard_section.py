"""The section of the guard: what it reacts to, and how."""

import math
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from narrowgauge.training.config.schema import Section


class GuardSection(Section):
    """Reactions to non-finite numbers and spikes, and checks for corruption."""

    max_skips: int = Field(10, ge=0, description="steps skipped in a row before it stops")
    spike: Literal["off", "warn", "skip", "rollback", "raise"] = Field(
        "warn",
        description="of a loss or gradient norm far above the last ones: off, warn, skip, rollback or raise",
    )
    spike_factor: float = Field(
        6.0, gt=0, description="deviations (loss) or times the median (norm) of a spike"
    )
    spike_window: int = Field(128, ge=4, description="steps that a spike is measured against")
    max_rollbacks: int = Field(3, ge=0, description="rollbacks of a run before it stops")
    raise_to: str = Field(
        "", description="raise: the cast that an operand is widened to; empty: the recipe's compute format"
    )
    raise_steps: float = Field(
        math.inf, ge=1, allow_inf_nan=True, description="raise: steps that a place stays wide; inf: for good"
    )
    raise_budget: int = Field(4, ge=1, description="raise: places of a run that are widened at most")
    lower_after: int = Field(
        0, ge=0, description="raise: steps until a place is lowered again if its gauges allow it; 0: never"
    )
    check_every: int = Field(
        1000,
        ge=0,
        description="steps between comparisons of replicas, beside those before a save; 0: only those",
    )
    replay_every: int = Field(
        0, ge=0, description="steps between one computed twice, which must agree in every bit; 0: never"
    )

    @field_validator("raise_steps")
    @classmethod
    def _is_whole(cls, value: float) -> float:
        if not math.isinf(value) and value != int(value):
            raise PydanticCustomError("not_whole", "steps are whole: a number such as 200, or inf for good")
        return value

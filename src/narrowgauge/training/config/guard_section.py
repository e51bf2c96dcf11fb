"""The guard's section of the configuration: its keys, which become `guard.GuardRules`."""

import math

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from narrowgauge.guard import GuardRules
from narrowgauge.guard.rules import Spike
from narrowgauge.training.config.schema import Section

_DEFAULT = GuardRules()


class GuardSection(Section):
    """Reactions to non-finite values and spikes, and checks for corruption."""

    max_skips: int = Field(_DEFAULT.max_skips, ge=0, description="steps skipped in a row before it stops")
    spike: Spike = Field(
        _DEFAULT.spike,
        description="of a loss or gradient norm far above the last ones: off, warn, skip, rollback or raise",
    )
    spike_factor: float = Field(
        _DEFAULT.spike_factor, gt=0, description="deviations (loss) or times the median (norm) of a spike"
    )
    spike_window: int = Field(
        _DEFAULT.spike_window, ge=4, description="steps that a spike is measured against"
    )
    max_rollbacks: int = Field(_DEFAULT.max_rollbacks, ge=0, description="rollbacks of a run before it stops")
    raise_to: str = Field(
        _DEFAULT.raise_to,
        description="raise: the cast that an operand is widened to; empty: the recipe's compute format",
    )
    raise_steps: float = Field(
        _DEFAULT.raise_steps,
        ge=1,
        allow_inf_nan=True,
        description="raise: steps that a place stays wide; inf: for good",
    )
    raise_budget: int = Field(
        _DEFAULT.raise_budget, ge=1, description="raise: places of a run that are widened at most"
    )
    lower_after: int = Field(
        _DEFAULT.lower_after,
        ge=0,
        description="raise: steps until a place is lowered again if its gauges allow it; 0: never",
    )
    check_every: int = Field(
        _DEFAULT.check_every,
        ge=0,
        description="steps between comparisons of replicas, besides those before a save; 0: only those",
    )
    replay_every: int = Field(
        _DEFAULT.replay_every,
        ge=0,
        description="steps between one computed twice, which must agree in every bit; 0: never",
    )

    @field_validator("raise_steps")
    @classmethod
    def _is_whole(cls, value: float) -> float:
        if not math.isinf(value) and value != int(value):
            raise PydanticCustomError("not_whole", "steps are whole: a number such as 200, or inf for good")
        return value

    def rules(self) -> GuardRules:
        """The rules that these keys set."""
        return GuardRules(**self.model_dump())

"""The guard's section of the configuration: its keys, which become `guard.GuardRules`."""

from pydantic import Field

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

    def rules(self) -> GuardRules:
        """The rules that these keys set."""
        return GuardRules(**self.model_dump())

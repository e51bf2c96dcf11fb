"""Does a narrow recipe pay? Its speed against the tokens that buy its loss back, in one line.

    hours = seconds of a step x tokens for the loss of bf16

A recipe that is s times as fast as bf16 and needs e percent more tokens for the same loss takes (1 + e /
100) / s of the device-hours. It pays if that is below 1 over the whole interval of the forecast, does not
if it is above 1 over all of it, and the forecast does not decide otherwise. Both speeds come from the
plan: counted or measured where it has that, else at best.
"""

import math
from dataclasses import dataclass
from typing import Any

from narrowgauge.forecast import Forecast, Forecaster
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.cluster.plan.estimate import estimate
from narrowgauge.trainer.cluster.plan.plan import Plan
from narrowgauge.trainer.models import count_block_weights
from narrowgauge.trainer.simulate import estimate_step

REFERENCE = "bf16"


@dataclass(frozen=True, slots=True)
class Breakeven:
    """A recipe's speed against its tokens.

    `share` is that of the device-hours for the loss of bf16 in those that bf16 takes: mean, low, high; None
    where the gap is not forecast.
    """

    forecast: Forecast  # of its gap
    speed: float  # its steps in the time of one step of bf16
    share: tuple[float, float, float] | None

    @property
    def word(self) -> str:
        """ "pays", "does not pay", "open" or "not forecast"."""
        if self.share is None:
            return "not forecast"
        _, low, high = self.share
        return "pays" if high < 1 else "does not pay" if low > 1 else "open"

    @property
    def line(self) -> str:
        """The decision for people."""
        name, extra = self.forecast.recipe, self.forecast.extra_tokens_percent
        speed = f"{name} is {self.speed:.2f} times as fast as {REFERENCE}"
        if self.share is None or extra is None:
            return f"{speed}; its loss is not forecast: {self.forecast.refused}"
        says = "it may pay, the forecast does not decide" if self.word == "open" else f"it {self.word}"
        more, least, most = map(_percent, (extra.mean, extra.low, extra.high))
        hours, fewest, longest = map(_times, self.share)
        return (
            f"{speed} and needs {more} more tokens for the same loss ({least} to {most}): {says}; {hours} "
            f"the device-hours of {REFERENCE} ({fewest} to {longest})"
        )

    def as_json(self) -> dict[str, Any]:
        """The decision for programs."""
        share = None
        if self.share is not None:
            named = zip(("mean", "low", "high"), self.share, strict=True)
            share = {name: x if math.isfinite(x) else None for name, x in named}
        return {"word": self.word, "speed": self.speed, "hours": share, "forecast": self.forecast.as_json()}


def breakeven(plan: Plan, tokens: int) -> Breakeven:
    """Set the speed of a plan's recipe against the tokens that buy its loss back; the plan is of a cluster.

    `tokens` is the budget at which the gap is forecast; 0 for the tokens of `training.steps`.
    """
    config, dims, cluster = plan.config, plan.parallel_dims, plan.cluster
    assert cluster is not None
    assert plan.time is not None
    wide = config.model_copy(update={"recipe": type(config.recipe)(name=REFERENCE)})
    with imagine(cluster.facts):
        step = estimate_step(wide, dims)
    speed = estimate(wide, dims, cluster, step).seconds_expected / plan.time.seconds_expected
    budget = tokens or config.training.steps * plan.time.tokens
    size = count_block_weights(config.spec.model)
    forecast = Forecaster().forecast(config.spec.recipe, size, budget, config.recipe.name)
    if (extra := forecast.extra_tokens_percent) is None:
        return Breakeven(forecast, speed, None)
    mean, low, high = ((1 + x / 100) / speed for x in (extra.mean, extra.low, extra.high))
    return Breakeven(forecast, speed, (mean, low, high))


def _percent(x: float) -> str:
    return f"{x:.0f} %" if x < 1e4 else "no number of"


def _times(x: float) -> str:
    return f"{x:.2f} times" if x < 100 else "never"

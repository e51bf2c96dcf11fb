"""The count of a step of many blocks, from steps of few: a count is linear in the blocks of each kind.

Blocks differ where the recipe treats them differently, such as the last 15 % (`few_blocks`). The only
figure that is not linear, the number of launches of a fused update, is off by less than one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from narrowgauge.system.devices import Device
from narrowgauge.trainer.simulate.count import StepTotals, Total, count_step
from narrowgauge.trainer.simulate.few_blocks import few_blocks, with_layers
from narrowgauge.trainer.simulate.speeds import H200, Speeds
from narrowgauge.trainer.training import Config


@dataclass(frozen=True)
class WholeCount:
    """A step of all blocks.

    Attributes:
        expected: the step at calibrated speeds.
        best: the same step at the ceilings.
        words: where the speeds come from.
        flops: FLOPs of the matmuls of a micro-batch, by kind.
        peak_bytes: the most bytes that are alive.
        state_bytes: bytes on the device between steps.
    """

    expected: StepTotals
    best: StepTotals
    words: str
    flops: Mapping[str, float]
    peak_bytes: int
    state_bytes: int

    @property
    def seconds_at_best(self) -> float:
        """Seconds of a step at the ceilings, the host's time aside."""
        return self.best.of_micro_batches("seconds") + self.best.update.seconds

    @property
    def seconds(self) -> float:
        """Expected seconds of a step.

        No operation takes less than at the ceilings (`Speeds.within`). The extrapolation to all blocks can
        differ in fused updates so small that launches are their cost, so the maximum is taken here as well.
        """
        return max(self.expected.seconds, self.seconds_at_best)


def count_whole(
    config: Config, facts: Device, speeds: Speeds = H200, ceilings: Speeds | None = None
) -> WholeCount:
    """Count a step of all blocks from steps of few.

    Args:
        config: the configuration, of one process.
        facts: the facts of the GPU.
        speeds: the speeds that, calibrated, turn work into seconds.
        ceilings: the speeds that nothing exceeds; None for `speeds` as they are.

    Raises:
        UserError: as `count_step`.
    """
    parts = [(count_step(with_layers(config, n), facts), w) for n, w in few_blocks(config)]
    flops = defaultdict[str, float](float)
    for step, w in parts:
        for event in step.micro.events:
            flops[event.cost.kind] += w * event.cost.flops
    best = ceilings or speeds
    expected = speeds.calibrated().within(best)
    return WholeCount(
        _sum([(step.totals(expected), w) for step, w in parts]),
        _sum([(step.totals(best), w) for step, w in parts]),
        speeds.words,
        {kind: n for kind, n in flops.items() if n > 0},
        round(sum(w * step.peak_bytes for step, w in parts)),
        round(sum(w * step.state_bytes for step, w in parts)),
    )


def _sum(parts: Sequence[tuple[StepTotals, float]]) -> StepTotals:
    """The sum of steps, each as often as its weight specifies."""
    first, further, update = (
        _sum_of([(getattr(step, name), w) for step, w in parts]) for name in ("first", "further", "update")
    )
    return StepTotals(first, further, update, parts[0][0].micro_batches)


def _sum_of(parts: Sequence[tuple[Total, float]]) -> Total:
    """The weighted sum of totals; counts stay whole numbers."""
    values: dict[str, Any] = {}
    for field in fields(Total):
        value = sum(weight * getattr(total, field.name) for total, weight in parts)
        is_whole = isinstance(getattr(parts[0][0], field.name), int)
        values[field.name] = round(value) if is_whole else value
    return Total(**values)

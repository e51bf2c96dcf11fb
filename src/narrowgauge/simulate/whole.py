"""The count of a step of many blocks, from steps of few: a count is linear in the blocks of each kind.

Blocks differ where the recipe says so, for the last 15 % of them, say (`few_blocks`). What is not linear in
them, the number of launches of a fused update, is off by less than one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from narrowgauge.devices import Device
from narrowgauge.simulate.count import Total, count_step
from narrowgauge.simulate.few_blocks import few_blocks, with_layers
from narrowgauge.simulate.speeds import H200, Speeds
from narrowgauge.training import Config


@dataclass(frozen=True)
class WholeCount:
    """A step of all blocks; calibrated, unless said.

    Attributes:
        micro_batch: one micro-batch.
        update: clipping, the update and what follows.
        micro_batches: micro-batches of a step.
        words: where the speeds come from.
        at_ceilings: one micro-batch, not calibrated.
        flops: operations of the products of a micro-batch, by kind.
        peak_bytes: the most bytes that are alive.
    """

    micro_batch: Total
    update: Total
    micro_batches: int
    words: str
    at_ceilings: Total
    flops: Mapping[str, float]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.micro_batches * self.micro_batch.step_seconds + self.update.step_seconds


def count_whole(
    config: Config, facts: Device, speeds: Speeds = H200, ceilings: Speeds | None = None
) -> WholeCount:
    """Count a step of all blocks from steps of few.

    Args:
        config: the configuration, of one process.
        facts: the facts of the GPU.
        speeds: the speeds that turn work into seconds.
        ceilings: the speeds of `at_ceilings`; None for `speeds` as they are.

    Raises:
        UserError: as `count_step`.
    """
    parts = [(count_step(with_layers(config, n), facts, speeds), w) for n, w in few_blocks(config)]
    one, flops = parts[0][0], defaultdict[str, float](float)
    for step, w in parts:
        for event in step.micro:
            flops[event.cost.kind] += w * event.cost.flops
    return WholeCount(
        _sum([(step.micro_batch(calibrated=True), w) for step, w in parts]),
        _sum([(step.of_update(calibrated=True), w) for step, w in parts]),
        one.micro_batches,
        one.speeds.words,
        _sum([(step.micro_batch(at=ceilings or speeds), w) for step, w in parts]),
        {kind: n for kind, n in flops.items() if n > 0},
        round(sum(w * step.peak_bytes for step, w in parts)),
    )


def _sum(parts: Sequence[tuple[Total, float]]) -> Total:
    """The sum of totals, each as often as its weight says; counts stay whole numbers."""
    values: dict[str, Any] = {}
    for field in fields(Total):
        value = sum(weight * getattr(total, field.name) for total, weight in parts)
        is_whole = isinstance(getattr(parts[0][0], field.name), int)
        values[field.name] = round(value) if is_whole else value
    return Total(**values)

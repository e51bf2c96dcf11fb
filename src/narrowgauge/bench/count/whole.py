"""The count of a step of many equal blocks, from two steps of few: a count is linear in them."""

from dataclasses import dataclass, fields
from typing import Any

from narrowgauge.bench.count.result import Total
from narrowgauge.bench.count.speeds import H200, Speeds
from narrowgauge.bench.count.step import count_step
from narrowgauge.devices import Device
from narrowgauge.training import Config
from narrowgauge.training.monitor.memory_estimate import with_layers


@dataclass(frozen=True)
class WholeCount:
    """A step of all blocks, calibrated.

    Attributes:
        micro_batch: one micro-batch.
        update: clipping, the update and what follows.
        micro_batches: micro-batches of a step.
        words: where the speeds come from.
    """

    micro_batch: Total
    update: Total
    micro_batches: int
    words: str

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.micro_batches * self.micro_batch.step_seconds + self.update.step_seconds


def has_equal_blocks(config: Config) -> bool:
    """Whether the recipe treats all blocks of the model alike."""
    return not any(rule.first_blocks or rule.last_blocks for rule in config.spec.recipe.rules)


def count_whole(config: Config, facts: Device, speeds: Speeds = H200) -> WholeCount:
    """Count a step from two and three blocks (or groups of blocks, where only some are recomputed).

    The blocks have to be equal (`has_equal_blocks`). What is not linear in them, the number of launches of a
    fused update, is off by less than one.

    Raises:
        UserError: as `count_step`.
    """
    unit = config.training.recompute_every if config.training.recompute else 1
    layers = config.spec.model.layers
    few = count_step(with_layers(config, min(layers, 2 * unit)), facts, speeds)
    micro_batch, update = few.micro_batch(calibrated=True), few.of_update(calibrated=True)
    if layers > 2 * unit:
        more = count_step(with_layers(config, 3 * unit), facts, speeds)
        further = (layers - 2 * unit) / unit
        micro_batch = _extended(micro_batch, more.micro_batch(calibrated=True), further)
        update = _extended(update, more.of_update(calibrated=True), further)
    return WholeCount(micro_batch, update, few.micro_batches, few.speeds.words)


def _extended(few: Total, more: Total, further: float) -> Total:
    """`few`, and so many times what `more` has besides; counts stay whole numbers."""
    values: dict[str, Any] = {}
    for field in fields(Total):
        a, b = getattr(few, field.name), getattr(more, field.name)
        values[field.name] = type(a)(a + further * (b - a))
    return Total(**values)

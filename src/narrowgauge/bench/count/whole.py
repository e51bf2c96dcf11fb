"""The count of a step of many blocks, from steps of few: a count is linear in the blocks of each kind.

Blocks differ where the recipe says so, for the last 15 % of them, say. What is not linear in them, the number
of launches of a fused update, is off by less than one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from narrowgauge.bench.count.result import Total
from narrowgauge.bench.count.speeds import H200, Speeds
from narrowgauge.bench.count.step import count_step
from narrowgauge.devices import Device
from narrowgauge.training import Config
from narrowgauge.training.monitor.memory_estimate import with_layers


@dataclass(frozen=True)
class WholeCount:
    """A step of all blocks; calibrated, unless said.

    Attributes:
        micro_batch: one micro-batch.
        update: clipping, the update and what follows.
        micro_batches: micro-batches of a step.
        words: where the speeds come from.
        at_ceilings: one micro-batch, not calibrated.
        peak_bytes: the most bytes that are alive.
    """

    micro_batch: Total
    update: Total
    micro_batches: int
    words: str
    at_ceilings: Total
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.micro_batches * self.micro_batch.step_seconds + self.update.step_seconds


def count_whole(config: Config, facts: Device, speeds: Speeds = H200) -> WholeCount:
    """Count a step of all blocks from steps of few.

    Raises:
        UserError: as `count_step`.
    """
    parts = [(count_step(with_layers(config, n), facts, speeds), w) for n, w in parts_of(config)]
    one = parts[0][0]
    return WholeCount(
        _sum([(step.micro_batch(calibrated=True), w) for step, w in parts]),
        _sum([(step.of_update(calibrated=True), w) for step, w in parts]),
        one.micro_batches,
        one.speeds.words,
        _sum([(step.micro_batch(), w) for step, w in parts]),
        round(sum(w * step.peak_bytes for step, w in parts)),
    )


def parts_of(config: Config) -> list[tuple[int, float]]:
    """Numbers of blocks, and how often a step of so many counts: in sum, the model's blocks of each kind.

    Two groups of blocks, three, and, for each further kind of them, the least number that has one more.
    """
    layers, unit = config.spec.model.layers, _unit(config)
    whole = _groups(config, layers)
    kinds = sorted(whole)

    def counts(groups: Mapping[Any, float]) -> list[float]:
        return [1.0, *(groups.get(kind, 0.0) for kind in kinds)]  # 1: what a model has besides blocks

    chosen: list[int] = []
    columns: list[list[float]] = []
    for n in range(2 * unit, layers, unit):
        groups = _groups(config, n)
        if not set(groups) <= set(whole):
            continue  # a kind that the whole model does not have
        weights, _, rank, _ = np.linalg.lstsq(np.array([*columns, counts(groups)]).T, counts(whole))
        if rank > len(chosen):  # it says something new
            chosen.append(n)
            columns.append(counts(groups))
            if np.allclose(np.array(columns).T @ weights, counts(whole)):
                return [(n, float(w)) for n, w in zip(chosen, weights, strict=True)]
    return [(layers, 1.0)]


def _groups(config: Config, layers: int) -> dict[Any, float]:
    """The number of groups of each kind in a model of so many blocks; a last one that is not full is a part.

    A group begins with a block that is recomputed, where only some are. Blocks are of one kind if the same
    rules select them.
    """
    rules = [rule for rule in config.spec.recipe.rules if rule.first_blocks or rule.last_blocks]
    kinds = [tuple(rule.selects("", block, layers) for rule in rules) for block in range(layers)]
    found: dict[Any, float] = {}
    unit = _unit(config)
    for begin in range(0, layers, unit):
        group = kinds[begin : begin + unit]
        kind = (*group, *[group[-1]] * (unit - len(group)))
        found[kind] = found.get(kind, 0.0) + len(group) / unit
    return found


def _unit(config: Config) -> int:
    return config.training.recompute_every if config.training.recompute else 1


def _sum(parts: Sequence[tuple[Total, float]]) -> Total:
    """The sum of totals, each as often as its weight says; counts stay whole numbers."""
    values: dict[str, Any] = {}
    for field in fields(Total):
        value = sum(weight * getattr(total, field.name) for total, weight in parts)
        is_whole = isinstance(getattr(parts[0][0], field.name), int)
        values[field.name] = round(value) if is_whole else value
    return Total(**values)

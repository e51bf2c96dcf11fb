"""What an advice may set for a recipe and a layout, and the fastest settings that fit.

    micro-batch        16, 8, 4, 2, 1 sequences, of those that divide the batch
    recomputation      none, of the MLP, of whole blocks
    offload            none, of all state
    chunked loss       no, yes

Each step along the first three axes lowers the memory and the speed. So where a setting fits, those beyond it
need no plan. A chunked loss may be faster or slower, and so may more micro-batches of a pipeline, which wait
less: neither rules out another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from narrowgauge.distributed import ParallelDims
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster
from narrowgauge.trainer.cluster.plan.plan import expected_time, room_of
from narrowgauge.trainer.experiment.grid import with_keys
from narrowgauge.trainer.simulate import StepEstimate, WholeCount, estimate_step
from narrowgauge.trainer.training import Config, make_config
from narrowgauge.trainer.training.config.micro_batch import fitting_sizes

MICRO_BATCHES = (16, 8, 4, 2, 1)
RECOMPUTE: tuple[bool | str, ...] = (False, "selective", True)
OFFLOAD = ("", "master,grad,m,v")


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe and a layout."""

    micro_batch_size: int
    recompute: bool | str
    offload: str
    chunked_loss: bool

    @property
    def words(self) -> str:
        """The setting for people."""
        found = [f"micro-batches of {self.micro_batch_size}"]
        if self.recompute:
            found.append(f"{'the MLP is' if self.recompute == 'selective' else 'blocks are'} recomputed")
        if self.chunked_loss:
            found.append("the loss is computed in chunks")
        if self.offload:
            found.append("state in the host's memory")
        return ", ".join(found)

    @property
    def keys(self) -> dict[str, int | str]:
        """The setting as keys of the configuration."""
        training = {"micro_batch_size": self.micro_batch_size, "recompute": self.recompute}
        keys = {f"training.{k}": v for k, v in {**training, "chunked_loss": self.chunked_loss}.items()}
        return keys | ({"recipe.offload": self.offload} if self.offload else {})

    def is_beyond(self, other: "Setting") -> bool:
        """Whether it lies further along the axes that lower memory and speed: it is slower."""
        mine, theirs = (
            (-one.micro_batch_size, RECOMPUTE.index(one.recompute), OFFLOAD.index(one.offload))
            for one in (self, other)
        )
        further = all(a >= b for a, b in zip(mine, theirs, strict=True))
        return further and self.chunked_loss == other.chunked_loss


@dataclass(frozen=True)
class Point:
    """A setting that was planned: its configuration, the bytes that a step needs of a device, whether it has
    them, and the expected seconds of a step, 0 where it was not timed.
    """

    setting: Setting
    config: Config
    step: StepEstimate
    needed: int
    fits: bool
    seconds: float = 0.0


@dataclass
class Space:
    """The settings of one recipe and one layout on a cluster, each planned at most once.

    `values` are what all settings share, the recipe and the batch among them; `counts` the count of each
    setting that was timed, which the layouts of a recipe share.
    """

    values: Mapping[str, Mapping[str, Any]]
    dims: ParallelDims
    cluster: Cluster
    counts: dict[Setting, WholeCount] = field(default_factory=dict)
    planned: dict[Setting, Point] = field(default_factory=dict, init=False)

    @cached_property
    def settings(self) -> list[Setting]:
        """All settings; none comes before one that it lies beyond."""
        fitting = fitting_sizes(int(self.values["training"]["batch_size"]), self.dims)
        sizes = [n for n in MICRO_BATCHES if n in fitting]
        offload = OFFLOAD if self.cluster.facts.is_gpu else OFFLOAD[:1]
        return [Setting(*one) for one in product(sizes, RECOMPUTE, offload, (False, True))]

    def at(self, setting: Setting) -> Point:
        """The point of a setting, planned for memory."""
        if setting not in self.planned:
            config = make_config(with_keys(self.values, setting.keys))
            room = room_of(config, self.cluster)
            with imagine(self.cluster.facts):
                step = estimate_step(config, self.dims)
            needed = room.needed(step.memory, self.dims)
            self.planned[setting] = Point(setting, config, step, needed, needed <= room.limit)
        return self.planned[setting]

    def timed(self, setting: Setting) -> Point:
        """The point of a setting, with the expected seconds of its step."""
        point = self.at(setting)
        if not point.seconds:
            count = self.counts.get(setting)
            time, expected = expected_time(point.config, self.dims, self.cluster, point.step, count)
            self.counts[setting] = time.count
            seconds = time.seconds / (1.0 if expected is None else expected.share)
            point = self.planned[setting] = replace(point, seconds=seconds)
        return point

    def least(self) -> Point:
        """The point that needs the least memory: of the smallest micro-batch, or of a single one.

        A single micro-batch adds no gradients, and so may need less than several smaller ones.
        """
        ends = {self.settings[0].micro_batch_size, self.settings[-1].micro_batch_size}
        sizes = ends if self.dims.pipeline == 1 else {one.micro_batch_size for one in self.settings}
        last = self.settings[-1]
        corners = [
            replace(last, micro_batch_size=n, chunked_loss=is_chunked)
            for n, is_chunked in product(sorted(sizes), (False, True))
        ]
        return min(map(self.at, corners), key=lambda point: point.needed)

    def best(self) -> Point | None:
        """The fastest point that fits; None if none does."""
        if not self.least().fits:
            return None
        found: list[Point] = []
        for setting in self.settings:
            size = None if self.dims.pipeline == 1 else setting.micro_batch_size
            faster = [one.setting for one in found if size in (None, one.setting.micro_batch_size)]
            if not any(map(setting.is_beyond, faster)) and self.at(setting).fits:
                found.append(self.timed(setting))
        return min(found, key=lambda point: point.seconds)


def layouts(devices: int, per_node: int, heads: int, layers: int) -> list[ParallelDims]:
    """The layouts of some devices.

    Replicas, shards, and shards with tensor parallelism in a node. On several nodes also replicas of a node's
    shards, and pipelines of whole layers with and without the widest tensor parallelism; in one node the
    links are fast, and a pipeline would only add waiting.
    """
    if devices == 1:
        return [ParallelDims()]
    found = [ParallelDims(replicate=devices), ParallelDims(shard=devices)]
    widths = [n for n in (2, 4, 8) if n <= per_node and devices % n == 0 == heads % n]
    found += [ParallelDims(shard=devices // n, tensor=n) for n in widths]
    if devices > per_node:
        if per_node > 1:
            found.append(ParallelDims(replicate=devices // per_node, shard=per_node))
        for stages, width in product((2, 4, 8), (1, *widths[-1:])):
            if layers % stages == 0 == devices % (stages * width):
                found.append(ParallelDims(stages, shard=devices // (stages * width), tensor=width))
    return found

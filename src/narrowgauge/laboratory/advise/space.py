"""The space of an advice: what may be set, and the fastest settings of a recipe and a layout that fit.

    micro-batch        16, 8, 4, 2, 1 sequences, of those that divide the batch
    recomputation      none, of the MLP, of whole blocks
    chunked loss       no, yes
    offload            none, of all state

Each step along the axes of micro-batch, recomputation and offload lowers the memory and the speed. A chunked
loss may be faster or slower, and so may more micro-batches of a pipeline, which wait less. Each kind of loss,
and in a pipeline each micro-batch, is searched by itself: the fastest settings that fit are among those whose
every neighbor one step back does not fit. So the search begins at the fastest corner, walks from settings
that do not fit to their neighbors, and computes times only at the border. `every_point` is the slow way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from narrowgauge.cluster.plan.cluster_spec import Cluster
from narrowgauge.cluster.plan.plan import expected_time, room_of
from narrowgauge.devices import imagine
from narrowgauge.distributed import ParallelDims
from narrowgauge.simulate import StepEstimate, WholeCount, estimate_step
from narrowgauge.training import Config, make_config
from narrowgauge.training.config.micro_batch import fitting_sizes

MICRO_BATCHES = (16, 8, 4, 2, 1)
RECOMPUTE: tuple[bool | str, ...] = (False, "selective", True)
OFFLOAD = ("", "master,grad,m,v")
Index = tuple[int, int, int, int]


@dataclass(frozen=True)
class Setting:
    """One point of the space for a recipe and a layout."""

    micro_batch_size: int
    recompute: bool | str
    chunked_loss: bool
    offload: str

    @property
    def words(self) -> str:
        """The setting for people."""
        found = [f"micro-batches of {self.micro_batch_size}"]
        if self.recompute:
            found.append(
                "the MLP is recomputed" if self.recompute == "selective" else "blocks are recomputed"
            )
        if self.chunked_loss:
            found.append("the loss is computed in chunks")
        if self.offload:
            found.append("state in the host's memory")
        return ", ".join(found)

    @property
    def options(self) -> list[str]:
        """The setting as options of a command line."""
        words = ["--training.micro_batch_size", str(self.micro_batch_size)]
        if self.recompute:
            words += ["--training.recompute", str(self.recompute).lower()]
        if self.chunked_loss:
            words += ["--training.chunked_loss", "true"]
        return words + (["--recipe.offload", self.offload] if self.offload else [])

    def put(self, values: Mapping[str, Mapping[str, Any]]) -> Config:
        """The configuration of some values with this setting."""
        training = {
            "micro_batch_size": self.micro_batch_size,
            "recompute": self.recompute,
            "chunked_loss": self.chunked_loss,
        }
        recipe = {"offload": self.offload} if self.offload else {}
        return make_config(
            {
                **values,
                "training": {**values["training"], **training},
                "recipe": {**values["recipe"], **recipe},
            }
        )


@dataclass(frozen=True)
class Point:
    """A setting that was planned.

    Attributes:
        setting: The setting.
        config: Its configuration.
        step: Memory and traffic of a step.
        needed: Bytes that a step needs of a device.
        fits: Whether it has them.
        seconds: The expected seconds of a step; 0 where it does not fit, and was not timed.
    """

    setting: Setting
    config: Config
    step: StepEstimate
    needed: int
    fits: bool
    seconds: float = 0.0


class Space:
    """The settings of one recipe and one layout on a cluster, each planned at most once."""

    def __init__(
        self,
        values: Mapping[str, Mapping[str, Any]],
        dims: ParallelDims,
        cluster: Cluster,
        counts: dict[Setting, WholeCount] | None = None,
    ) -> None:
        """Take the values that all settings share; the recipe and the batch are among them.

        Args:
            values: The values.
            dims: The layout, without expert parallelism.
            cluster: The cluster.
            counts: Filled with the count of each setting that was timed; layouts of a recipe share it.
        """
        self.values, self.dims, self.cluster = values, dims, cluster
        self.counts = {} if counts is None else counts
        self.planned: dict[Index, Point] = {}

    @cached_property
    def axes(self) -> tuple[tuple[int, ...], tuple[bool | str, ...], tuple[bool, ...], tuple[str, ...]]:
        """The values of each axis, the fastest first."""
        fitting = fitting_sizes(int(self.values["training"]["batch_size"]), self.dims)
        sizes = tuple(n for n in MICRO_BATCHES if n in fitting)
        has_host = self.cluster.facts.is_gpu
        return sizes, RECOMPUTE, (False, True), OFFLOAD if has_host else OFFLOAD[:1]

    def setting(self, index: Index) -> Setting:
        """The setting at some indices."""
        a, b, c, d = index
        sizes, recompute, chunked, offload = self.axes
        return Setting(sizes[a], recompute[b], chunked[c], offload[d])

    def at(self, index: Index) -> Point:
        """The point at some indices, planned for memory."""
        if index not in self.planned:
            setting = self.setting(index)
            config = setting.put(self.values)
            room = room_of(config, self.cluster)
            with imagine(self.cluster.facts):
                step = estimate_step(config, self.dims)
            needed = room.needed(step.memory, self.dims)
            self.planned[index] = Point(setting, config, step, needed, needed <= room.limit)
        return self.planned[index]

    def timed(self, index: Index) -> Point:
        """The point at some indices, with the expected seconds of its step."""
        point = self.at(index)
        if not point.seconds:
            seconds = self._seconds(point.setting, point.config, point.step)
            point = self.planned[index] = replace(point, seconds=seconds)
        return point

    def corners(self) -> list[tuple[Index, Index]]:
        """(the fastest setting, the one that needs the least memory) of all that are searched together."""
        a, b, _, d = (len(axis) - 1 for axis in self.axes)
        ranges = [(0, a)] if self.dims.pipeline == 1 else [(n, n) for n in range(a + 1)]
        return [
            ((first, 0, chunked, 0), (last, b, chunked, d))
            for chunked in range(len(self.axes[2]))
            for first, last in ranges
        ]

    def least(self) -> Point:
        """The point that needs the least memory."""
        smallest = [index for _, corner in self.corners() for index in self._smallest(corner)]
        return min(map(self.at, smallest), key=lambda point: point.needed)

    def _smallest(self, corner: Index) -> list[Index]:
        """A corner and, since it adds no gradients and may need less, a single micro-batch."""
        is_single = self.axes[0][0] * self.dims.data == int(self.values["training"]["batch_size"])
        return [corner, (0, *corner[1:])] if is_single and self.dims.pipeline == 1 else [corner]

    def border(self, first: Index, corner: Index) -> list[Index]:
        """The settings from the fastest to a corner that fit and whose faster neighbors do not."""
        if self.at(first).fits:
            return [first]
        if not any(self.at(index).fits for index in self._smallest(corner)):
            return []
        waiting = [first]
        seen, found = set(waiting), list[Index]()
        while waiting:
            index = waiting.pop(0)
            if any(all(x >= y for x, y in zip(index, other, strict=True)) for other in found):
                continue
            if self.at(index).fits:
                found.append(index)
                continue
            for neighbor in _neighbors(index, corner):
                if neighbor not in seen:
                    seen.add(neighbor)
                    waiting.append(neighbor)
        return found

    def best(self) -> Point | None:
        """The fastest point that fits; None if none does."""
        best: Point | None = None
        ranges = self.corners()
        if self.dims.pipeline > 1:  # the likeliest first, so that it rules out others
            ranges = sorted(ranges, key=lambda ends: self.bound(ends[0]))
        for first, corner in ranges:
            if best is not None and self.dims.pipeline > 1 and self.bound(first) >= best.seconds:
                break
            for point in map(self.timed, self.border(first, corner)):
                best = point if best is None or point.seconds < best.seconds else best
        return best

    def bound(self, index: Index) -> float:
        """The least seconds of a setting: no step sends less than that of the fewest micro-batches."""
        setting = self.setting(index)
        return self._seconds(setting, setting.put(self.values), self.at((0, 0, 0, 0)).step)

    def _seconds(self, setting: Setting, config: Config, step: StepEstimate) -> float:
        """The expected seconds of a step with some memory and traffic."""
        time, expected = expected_time(config, self.dims, self.cluster, step, self.counts.get(setting))
        self.counts[setting] = time.count
        return time.seconds / (1.0 if expected is None else expected.share)

    def every_point(self) -> Iterator[Point]:
        """All points that fit, with their times: the slow way to `best`."""
        for index in product(*(range(len(axis)) for axis in self.axes)):
            a, b, c, d = index
            if self.at((a, b, c, d)).fits:
                yield self.timed((a, b, c, d))


def _neighbors(index: Index, corner: Index) -> Iterator[Index]:
    """The indices one step further along each axis."""
    for axis in range(4):
        if index[axis] < corner[axis]:
            a, b, c, d = (n + (axis == i) for i, n in enumerate(index))
            yield a, b, c, d


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

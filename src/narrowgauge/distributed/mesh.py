"""The processes of a run as a grid, each direction of which divides something else.

    pipeline    the layers            a stage sends what it computed to the next
    replicate   the batch             weights whole on each, gradients summed (DDP)
    shard       the batch             weights, gradients and moments cut over the processes (FSDP2, ZeRO)
    context     the sequence          each process has some tokens, and all of them for some heads
    tensor      the matrices          each process has some heads and some hidden units

Neighbours in `tensor` are neighbours in rank, so that what talks most is closest. `replicate` x `shard` is
the data: processes that differ there meet other sequences. `context` and `tensor` share their sequences.

ZeRO's stages (arXiv 1910.02054) by name, of the direction `shard`:

    0   nothing is cut: the same as `replicate`
    1   moments are cut; gradients are summed once a step, whole weights stay between micro-batches
    2   gradients, too: they are summed and cut after each micro-batch
    3   weights, too: gathered for a layer's forward and backward pass only
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from narrowgauge.errors import UserError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
# Directions taken together.
COMBINED_AXES = {
    "cut": ("shard", "context"),  # over which FSDP cuts
    "data": ("replicate", "shard", "context"),  # that each have a gradient of the same weights
    "sequence": ("context", "tensor"),  # that compute a sequence together
    "stage": ("replicate", "shard", "context", "tensor"),  # that have the same layers
}


@dataclass(frozen=True)
class ParallelDims:
    """How many processes in each direction, the ZeRO stage of `shard`, the chunks of each in `pipeline`."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 3
    chunks: int = 1

    @property
    def stages(self) -> int:
        """Of the pipeline: each of its processes has `chunks` of them."""
        return self.pipeline * self.chunks

    @property
    def size(self) -> int:
        """Processes in all."""
        return prod(getattr(self, name) for name in AXES)

    @property
    def data(self) -> int:
        """Processes that meet sequences of their own."""
        return self.replicate * self.shard

    @property
    def is_cut(self) -> bool:
        """Whether weights are cut over processes (FSDP2); else they are whole (DDP, or alone)."""
        return self.shard > 1 and self.zero > 0


def resolve_dims(layout: ParallelDims, processes: int) -> ParallelDims:
    """The layout for so many processes; a `shard` of 0 takes those that are left.

    Raises:
        UserError: the directions' product is not the number of processes.
    """
    others = prod(getattr(layout, name) for name in AXES if name != "shard")
    shard = layout.shard or max(1, processes // others)
    found = ParallelDims(
        **{name: getattr(layout, name) for name in (*AXES, "zero", "chunks")} | {"shard": shard}
    )
    if found.size != processes:
        product = " x ".join(f"{name} {getattr(found, name)}" for name in AXES)
        raise UserError(
            f"[parallel] asks for {product} = {found.size} processes, and there are {processes}; start that "
            "many, or change one of the numbers (shard = 0 takes what is left)"
        )
    return found


class Mesh:
    """The grid of a run, and the place of this process in it.

    `ends` are the first and the last stage of this process's pipeline, where it is one of them.
    """

    ends: dist.ProcessGroup | None = None
    micro_batches = 1  # of a step, where processes are imagined (`fake_mesh.py`)

    def __init__(self, layout: ParallelDims, device: torch.device) -> None:
        """Make the groups of all directions; every process calls this at the same time."""
        self.layout = layout
        self._grids: dict[str, DeviceMesh] = {}
        if layout.size > 1:
            sizes = tuple(getattr(layout, name) for name in AXES)
            grid = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
            self._grids = {name: grid[name] for name in AXES}
            self._grids |= {name: grid[some]._flatten(name) for name, some in COMBINED_AXES.items()}
            if layout.pipeline > 1:
                self._make_ends(grid)
            if layout.is_cut and layout.replicate > 1:
                cut = (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
                names = ("pipeline", "replicate", "cut", "tensor")
                self._grids["copies of cuts"] = init_device_mesh(device.type, cut, mesh_dim_names=names)[
                    "replicate", "cut"
                ]

    def _make_ends(self, grid: DeviceMesh) -> None:
        """Groups of the first and the last stage, which share a tied embedding."""
        pipelines = grid.mesh.flatten(1).T  # one row each
        for first, *_, last in pipelines.tolist():
            pair = dist.new_group([first, last])
            if dist.get_rank() in (first, last):
                self.ends = pair

    @property
    def is_alone(self) -> bool:
        """Whether there is only this process."""
        return not self._grids

    def size(self, direction: str) -> int:
        """Processes in a direction, or in several together."""
        return prod(getattr(self.layout, name) for name in COMBINED_AXES.get(direction, (direction,)))

    def index(self, direction: str) -> int:
        """The place of this process among them."""
        return 0 if self.is_alone else self._grids[direction].get_local_rank()

    def group(self, direction: str) -> dist.ProcessGroup:
        """The processes that differ from this one in that direction only."""
        return self._grids[direction].get_group()

    def groups(self, *directions: str) -> tuple[dist.ProcessGroup, ...]:
        """Those of the directions that have more than one process."""
        return tuple(self.group(name) for name in directions if self.size(name) > 1)

    @property
    def cuts(self) -> DeviceMesh:
        """The part of the grid that FSDP works on: one direction, or copies of it."""
        return self._grids.get("copies of cuts", self._grids["cut"])

    @property
    def data_index(self) -> int:
        """Which of the `layout.data` parts of a batch is this process's."""
        return self.index("replicate") * self.layout.shard + self.index("shard")

"""Simulates one rank of an N-process run on meta tensors, with torch's fake process group.

    with fake_mesh(parallel_dims, rank) as mesh:
        Trainer.begin(config.plan, torch.device("meta"), mesh)

Collectives of a fake group return at once and compute nothing; meta tensors have no values to corrupt. So the
code of a run on thousands of processes runs on one, with the shapes, the memory and the collectives
(`byte_counter.py`) of one rank. FSDP does not accept meta tensors; `fake_fsdp.py` simulates it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.dims import ParallelDims
from narrowgauge.distributed.mesh import COMBINED_AXES, MESH_AXES, Mesh
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.simulate.fake_fsdp import Buffers, FakeFSDPUnit
from narrowgauge.simulate.fake_pipeline import FakePipeline
from narrowgauge.torch_compat import register_fake_backend


class FakeMesh(Mesh):
    """The device mesh of a simulated rank."""

    def __init__(self, parallel_dims: ParallelDims, rank: int, device: torch.device) -> None:
        """Make only the groups of this rank."""
        super().__init__(ParallelDims(), device)
        self.parallel_dims, self.rank, self.stand_ins = parallel_dims, rank, self
        self._buffers = Buffers()
        sizes = [getattr(parallel_dims, name) for name in MESH_AXES]
        self._mesh = torch.arange(parallel_dims.size).view(sizes)
        self._coordinates = torch.nonzero(self._mesh == rank)[0].tolist()
        self._ranks = {name: self._members((name,)) for name in MESH_AXES}
        self._ranks |= {name: self._members(axes) for name, axes in COMBINED_AXES.items()}
        self._groups: dict[str, dist.ProcessGroup] = {}
        if parallel_dims.pipeline > 1:
            first, *_, last = self._ranks["pipeline"]
            if rank in (first, last):
                self.first_last_group = dist.new_group([first, last])

    def _members(self, axes: tuple[str, ...]) -> list[int]:
        index = tuple(
            slice(None) if name in axes else at for name, at in zip(MESH_AXES, self._coordinates, strict=True)
        )
        return self._mesh[index].flatten().tolist()

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self.parallel_dims.size == 1

    def index(self, axis: str) -> int:
        """Rank of this process along an axis or a combined axis."""
        return self._ranks[axis].index(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes whose coordinates differ from this one's only along that axis."""
        if axis not in self._groups:
            self._groups[axis] = dist.new_group(self._ranks[axis])
        return self._groups[axis]

    def fully_shard(self, module: nn.Module, reshard_after_forward: bool, axis: str) -> None:
        """Shard a module's parameters over the ranks of an axis, as FSDP2 would."""
        FakeFSDPUnit(module, self, reshard_after_forward, self._buffers, axis)

    def pipeline(self, model: Transformer, modules: list[Any]) -> FakePipeline:
        """The simulated pipeline of this process's stages."""
        return FakePipeline(model, modules, self)


@contextmanager
def fake_mesh(parallel_dims: ParallelDims, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of rank `rank` of a simulated run; for one process an ordinary mesh.

    Raises:
        UserError: this process is already in a process group.
    """
    device = torch.device("meta")
    if parallel_dims.size == 1:
        yield Mesh(parallel_dims, device)
        return
    if dist.is_initialized():
        raise UserError(
            "several processes can be simulated only outside a process group, and this process is in one; "
            "use `narrowgauge plan` instead"
        )
    register_fake_backend()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=parallel_dims.size)
    try:
        yield FakeMesh(parallel_dims, rank, device)
    finally:
        dist.destroy_process_group()

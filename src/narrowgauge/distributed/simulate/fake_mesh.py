"""Processes that are not there, for tensors that have no numbers: what one of N processes would do.

    with fake_mesh(layout, rank, device) as mesh:
        Session.begin(config, torch.device("meta"), mesh)

Torch's `fake` process group takes part in every collective alone, and leaves the results as they are; on the
meta device there is nothing in them to be wrong. So the code of a run on thousands of processes runs here, on
one, with the shapes, the memory and the collectives (`traffic.py`) that each of them would have. FSDP does
not take meta tensors; `imagined_shards.py` does its part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.distributed as dist

from narrowgauge.distributed.mesh import AXES, COMBINED_AXES, Mesh, ParallelDims
from narrowgauge.errors import UserError


class FakeMesh(Mesh):
    """The place of one process in a grid of processes that are not there."""

    def __init__(self, layout: ParallelDims, rank: int, device: torch.device) -> None:
        """Make the groups that this process is in, and no others."""
        super().__init__(ParallelDims(), device)
        self.layout, self.rank = layout, rank
        sizes = [getattr(layout, name) for name in AXES]
        self._grid = torch.arange(layout.size).view(sizes)
        self._place = torch.nonzero(self._grid == rank)[0].tolist()
        self._ranks = {name: self._members((name,)) for name in AXES}
        self._ranks |= {name: self._members(some) for name, some in COMBINED_AXES.items()}
        self._groups: dict[str, dist.ProcessGroup] = {}
        if layout.pipeline > 1:
            pipeline = self._ranks["pipeline"]
            if rank in (pipeline[0], pipeline[-1]):
                self.ends = dist.new_group([pipeline[0], pipeline[-1]])

    def _members(self, directions: tuple[str, ...]) -> list[int]:
        own = tuple(
            slice(None) if name in directions else at for name, at in zip(AXES, self._place, strict=True)
        )
        return self._grid[own].flatten().tolist()

    @property
    def is_alone(self) -> bool:
        """Whether there is only this process."""
        return self.layout.size == 1

    def index(self, direction: str) -> int:
        """The place of this process among those of a direction, or of several together."""
        return self._ranks[direction].index(self.rank)

    def group(self, direction: str) -> dist.ProcessGroup:
        """The processes that differ from this one in that direction only."""
        if direction not in self._groups:
            self._groups[direction] = dist.new_group(self._ranks[direction])
        return self._groups[direction]

    def ranks(self, direction: str) -> list[int]:
        """Their numbers among all."""
        return self._ranks[direction]


@contextmanager
def fake_mesh(layout: ParallelDims, rank: int = 0) -> Iterator[Mesh]:
    """A mesh of processes that are not there; of one process, an ordinary mesh.

    Raises:
        UserError: this process has joined others already, whom it would leave.
    """
    device = torch.device("meta")
    if layout.size == 1:
        yield Mesh(layout, device)
        return
    if dist.is_initialized():
        raise UserError(
            "the memory of several processes is looked at before they meet, and these have met; "
            "use `narrowgauge plan` instead"
        )
    import_module("torch.testing._internal.distributed.fake_pg")  # tells torch of the backend
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=layout.size)
    try:
        yield FakeMesh(layout, rank, device)
    finally:
        dist.destroy_process_group()

"""The device mesh of a run: the axes along which processes divide the work, and this process's coordinates.

    pipeline    the layers            a stage sends its output to the next
    replicate   the batch             full weights on each process, gradients summed (DDP)
    shard       the batch             weights, gradients and moments sharded over the processes (FSDP2, ZeRO)
    context     the sequence          each process has some tokens, and all of them for some heads
    tensor      the matrices          each process has some heads and some hidden units

Neighbours in `tensor` are neighbours in rank, so that the ranks that communicate most are closest.
`replicate` x `shard` are the data-parallel ranks: they have different sequences. `context` and `tensor` share
their sequences.

With experts over ranks, `shard` is two axes: `expert` neighbours hold different experts of each layer and
send each other their tokens, and the `expert_shard` ranks with the same experts shard these (FSDP2). All
other weights are sharded over both.

ZeRO's stages (arXiv 1910.02054) of the axis `shard`:

    0   nothing is sharded: the same as `replicate`
    1   moments are sharded; gradients are summed once a step, full weights stay between micro-batches
    2   gradients are sharded as well: they are reduce-scattered after each micro-batch
    3   weights are sharded as well: gathered only for a layer's forward and backward pass
"""

from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from narrowgauge.distributed.dims import ParallelDims
from narrowgauge.system.torch_compat import flatten_mesh

MESH_AXES = ("pipeline", "replicate", "expert_shard", "expert", "context", "tensor")
COMBINED_AXES = {
    "shard": ("expert_shard", "expert"),
    "fsdp": ("expert_shard", "expert", "context"),  # ranks over which FSDP shards
    "data": ("replicate", "expert_shard", "expert", "context"),  # each has a gradient of the same weights
    "expert_data": ("replicate", "expert_shard"),  # ranks that each have a gradient of the same experts
    "sequence": ("context", "tensor"),  # ranks that compute a sequence together
    "stage": ("replicate", "expert_shard", "expert", "context", "tensor"),  # ranks that have the same layers
}
HSDP_AXES = ("pipeline", "replicate", "fsdp", "tensor")  # of the mesh with replicas of FSDP's shards


class Mesh:
    """The device mesh of a run, and the coordinates of this process in it.

    Attributes:
        parallel_dims: the degrees of parallelism.
        first_last_group: the first and the last rank of this process's pipeline, if it is one of them.
    """

    first_last_group: dist.ProcessGroup | None = None

    def __init__(self, parallel_dims: ParallelDims, device: torch.device) -> None:
        """Create the process groups of all axes; every process calls this at the same time."""
        self.parallel_dims = parallel_dims
        self._meshes: dict[str, DeviceMesh] = {}
        if parallel_dims.size > 1:
            sizes = tuple(getattr(parallel_dims, name) for name in MESH_AXES)
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=MESH_AXES)
            self._meshes = {name: mesh[name] for name in MESH_AXES}
            self._meshes |= {name: flatten_mesh(mesh[axes], name) for name, axes in COMBINED_AXES.items()}
            if parallel_dims.pipeline > 1:
                pipelines = mesh.mesh.flatten(1).T.tolist()
                pairs = [[first, last] for first, *_, last in pipelines]  # which share a tied embedding
                self.first_last_group, _ = dist.new_subgroups_by_enumeration(pairs)
            if parallel_dims.is_sharded and parallel_dims.replicate > 1:
                sizes = tuple(self.size(name) for name in HSDP_AXES)
                hsdp_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=HSDP_AXES)
                self._meshes["hsdp"] = hsdp_mesh["replicate", "fsdp"]
                self._meshes["expert_hsdp"] = mesh["replicate", "expert_shard"]

    @property
    def is_single(self) -> bool:
        """Whether there is only this process."""
        return not self._meshes

    def size(self, axis: str) -> int:
        """Number of processes on an axis, or on a combined one."""
        return prod(getattr(self.parallel_dims, name) for name in COMBINED_AXES.get(axis, (axis,)))

    def index(self, axis: str) -> int:
        """Rank of this process on an axis."""
        return 0 if self.is_single else self._meshes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes whose coordinates differ from this one's on that axis only."""
        return self._meshes[axis].get_group()

    def groups(self, *axes: str) -> tuple[dist.ProcessGroup, ...]:
        """The groups of the axes that have more than one process."""
        return tuple(self.group(name) for name in axes if self.size(name) > 1)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The sub-mesh that FSDP works on: of one dimension, or of two with replicas (HSDP)."""
        return self._meshes.get("hsdp", self._meshes["fsdp"])

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The sub-mesh that FSDP works on for experts that are divided over processes."""
        return self._meshes.get("expert_hsdp", self._meshes["expert_shard"])

    @property
    def data_index(self) -> int:
        """The data-parallel rank: which of the `parallel_dims.data` shares of a batch this process has."""
        return self.index("replicate") * self.parallel_dims.shard + self.index("shard")

"""The degrees of parallelism of a run, one for each axis of its mesh (`mesh` describes the axes)."""

from dataclasses import dataclass, replace
from math import prod

from narrowgauge.system.errors import UserError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of parallelism.

    Attributes:
        pipeline: processes on the axis of this name; the same for `replicate`, `shard`, `context`, `tensor`.
        zero: the ZeRO stage of `shard`.
        chunks: pipeline stages of each process.
        expert: processes of `shard` over which the experts of a layer are divided.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 3
    chunks: int = 1
    expert: int = 1

    @property
    def expert_shard(self) -> int:
        """The number of processes of `shard` that have the same experts."""
        return self.shard // self.expert

    @property
    def stages(self) -> int:
        """The number of pipeline stages: each process of the pipeline has `chunks` of them."""
        return self.pipeline * self.chunks

    @property
    def size(self) -> int:
        """Number of processes."""
        return prod(getattr(self, name) for name in AXES)

    @property
    def text(self) -> str:
        """The axes with several processes, as in "replicate 64 x shard 8, expert 4"; "" for one process."""
        text = " x ".join(f"{name} {n}" for name in AXES if (n := getattr(self, name)) > 1)
        return f"{text}, expert {self.expert}" if self.expert > 1 else text

    @property
    def data(self) -> int:
        """The degree of data parallelism: the number of processes with different sequences."""
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the weights; otherwise each process has full ones (DDP, or one process)."""
        return self.shard > 1 and self.zero > 0


def resolve_dims(parallel_dims: ParallelDims, processes: int) -> ParallelDims:
    """The degrees of parallelism for a number of processes; a `shard` of 0 takes what other axes leave.

    Raises:
        UserError: the axes do not multiply to the number of processes.
    """
    others = prod(getattr(parallel_dims, name) for name in AXES if name != "shard")
    shard = parallel_dims.shard or max(1, processes // others)
    resolved = replace(parallel_dims, shard=shard)
    if resolved.size != processes:
        product = " x ".join(f"{name} {getattr(resolved, name)}" for name in AXES)
        raise UserError(
            f"[parallel] asks for {product} = {resolved.size} processes, and there are {processes}; start "
            f"them, as in torchrun --standalone --nproc-per-node {resolved.size} -m narrowgauge train, or "
            "change one of the numbers (shard = 0 takes what is left)"
        )
    return resolved

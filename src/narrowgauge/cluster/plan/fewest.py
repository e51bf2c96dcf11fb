"""The smallest number of devices on which a run fits, its state sharded over them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from narrowgauge.distributed import ParallelDims
from narrowgauge.simulate import Memory, estimate_memory
from narrowgauge.training import Config


@dataclass(frozen=True)
class Fewest:
    """The smallest mesh that fits, and the micro-batch that it leaves."""

    parallel_dims: ParallelDims
    micro_batch_size: int
    memory: Memory


def fewest_devices(
    config: Config,
    parallel_dims: ParallelDims,
    memory: Memory,
    limit: int,
    fits: Callable[[Memory, ParallelDims], bool],
) -> Fewest | None:
    """Search the smallest number of devices that a step fits on; None if its batch goes to no such number.

    The other axes and the batch stay as they are; replicas become shards. A process has at least one
    sequence, so a batch of B sequences goes to B shards at most, in smaller micro-batches where need be.

    Args:
        config: the configuration.
        parallel_dims: its mesh.
        memory: what a step takes on this mesh.
        limit: bytes that a device has.
        fits: whether a step's memory on a mesh fits.
    """
    batch, micro = config.training.batch_size, config.training.micro_batch_size
    # Fewer shards cannot hold the state; a tenth is left for the padding of shards.
    least = 0.9 * memory.state * parallel_dims.shard / limit if parallel_dims.zero == 3 else 1
    shards = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n >= parallel_dims.pipeline]
    # No estimate is possible of replicated weights (DDP) in the stages of a pipeline.
    has_replicas = parallel_dims.pipeline > 1 and parallel_dims.context > 1
    shards = [n for n in shards if n >= max(least, 1 + has_replicas) and n % parallel_dims.expert == 0]

    def of(shard: int) -> Fewest:
        share = batch // shard // parallel_dims.pipeline
        size = max(n for n in range(1, min(micro, share) + 1) if batch // shard % n == 0)
        training = config.training.model_copy(update={"micro_batch_size": size})
        mesh = replace(parallel_dims, replicate=1, shard=shard)
        memory = estimate_memory(config.model_copy(update={"training": training}), mesh)
        return Fewest(mesh, size, memory)

    if parallel_dims.replicate == 1 and fits(memory, parallel_dims):  # then no more devices are of interest
        shards, found = [n for n in shards if n <= parallel_dims.shard], Fewest(parallel_dims, micro, memory)
    elif not shards or not fits((found := of(shards[-1])).memory, found.parallel_dims):
        return None
    low, high = 0, len(shards) - 1  # those before `low` do not fit, and `high` does
    while low < high:
        middle = (low + high) // 2
        tried = of(shards[middle])
        if fits(tried.memory, tried.parallel_dims):
            found, high = tried, middle
        else:
            low = middle + 1
    return found

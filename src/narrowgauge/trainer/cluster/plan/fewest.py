"""The smallest number of devices on which a run fits, with its state sharded over them."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from narrowgauge.distributed import ParallelDims
from narrowgauge.trainer.simulate import Memory, estimate_memory
from narrowgauge.trainer.training import Config


@dataclass(frozen=True)
class Fewest:
    """The smallest mesh that fits, and its micro-batch and memory."""

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
    """Find the smallest number of devices that a step fits on; None if no number that divides the batch fits.

    The other axes and the batch stay the same; replicas become shards. A process has at least one sequence,
    so a batch of B sequences can be divided over at most B shards, in smaller micro-batches if necessary.
    `memory` is that of a step on this mesh, and `limit` the bytes of a device.
    """
    batch, micro = config.training.batch_size, config.training.micro_batch_size
    # With fewer shards the state cannot fit; the factor 0.9 allows for the padding of shards.
    least = 0.9 * memory.state * parallel_dims.shard / limit if parallel_dims.zero == 3 else 1
    shards = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n >= parallel_dims.pipeline]
    # Replicated weights (DDP) in the stages of a pipeline cannot be estimated.
    has_replicas = parallel_dims.pipeline > 1 and parallel_dims.context > 1
    shards = [n for n in shards if n >= max(least, 1 + has_replicas) and n % parallel_dims.expert == 0]

    @cache
    def of(shard: int) -> Fewest:
        share = batch // shard // parallel_dims.pipeline
        size = max(n for n in range(1, min(micro, share) + 1) if batch // shard % n == 0)
        mesh = replace(parallel_dims, replicate=1, shard=shard)
        memory = estimate_memory(config.with_training(micro_batch_size=size), mesh)
        return Fewest(mesh, size, memory)

    if parallel_dims.replicate == 1 and fits(memory, parallel_dims):  # then only fewer devices matter
        shards, found = [n for n in shards if n <= parallel_dims.shard], Fewest(parallel_dims, micro, memory)
    elif not shards or not fits((found := of(shards[-1])).memory, found.parallel_dims):
        return None
    last = len(shards) - 1  # which fits
    first = bisect_left(shards, True, hi=last, key=lambda n: fits(of(n).memory, of(n).parallel_dims))
    return of(shards[first]) if first < last else found

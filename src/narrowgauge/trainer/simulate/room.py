"""The memory of a device, and whether a step fits into it.

A step needs more than its tensors: torch's allocator loses memory to fragmentation, and the driver keeps a
context in the device's memory. `Room.reserved` is an allowance for both. It comes from the out-of-memory
messages of single processes that others have published, each of which states the memory of the process and of
its tensors, and what the allocator holds without use (experiments/LOG.md, 2026-11-28).
"""

from dataclasses import dataclass

from narrowgauge.distributed import ParallelDims
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.simulate.memory import Memory
from narrowgauge.trainer.training.config.config import Config

CONTEXT = int(0.6 * 2**30)  # bytes; 16 of 19 processes had at most so much
FRAGMENTATION = 0.025  # of the tensors' bytes; 9 of 11 processes had at most so much when their card was full


@dataclass(frozen=True)
class Room:
    """The memory available to a step.

    Attributes:
        limit: bytes per device.
        source: the device or setting that the limit comes from.
        has_host: whether the host's memory is separate from the device's.
        copies_saves: whether saves copy the state into the host's memory.
        context: bytes of the limit that the driver keeps: `CONTEXT` of a GPU's memory, 0 of a CPU's and of
            `training.memory_limit`, which limits the allocator.
    """

    limit: int
    source: str
    has_host: bool
    copies_saves: bool
    context: int = 0

    @classmethod
    def of(cls, config: Config, size: int, source: str, has_host: bool) -> "Room":
        """A device's memory of `size` bytes, or the configuration's limit instead."""
        limit, copies_saves = config.training.memory_limit, config.checkpoint.asynchronous
        if limit:
            return cls(parse_bytes(limit), f"training.memory_limit {limit}", has_host, copies_saves)
        return cls(size, source, has_host, copies_saves, CONTEXT if has_host else 0)

    def copy(self, memory: Memory, parallel_dims: ParallelDims) -> int:
        """Bytes of host memory for the copy of the state that an asynchronous save makes."""
        return copy_of_save(memory, parallel_dims) if self.copies_saves else 0

    def reserved(self, memory: Memory) -> int:
        """Bytes of the limit that no tensor can take: for fragmentation, and the driver's context."""
        return self.context + int(FRAGMENTATION * memory.peak) if self.has_host else 0

    def needed(self, memory: Memory, parallel_dims: ParallelDims) -> int:
        """Bytes of the limit that a step needs, including host memory unless that is separate."""
        host = sum(memory.host.values()) + self.copy(memory, parallel_dims)
        return memory.peak + self.reserved(memory) + (0 if self.has_host else host)

    def fits(self, memory: Memory, parallel_dims: ParallelDims) -> bool:
        """Whether a step of one process of this mesh fits."""
        return self.needed(memory, parallel_dims) <= self.limit


def copy_of_save(memory: Memory, parallel_dims: ParallelDims) -> int:
    """Bytes that a process copies for an asynchronous save; replicas share the state among them."""
    kept = sum(memory.device[name] for name in ("weights", "master", "m", "v"))
    kept += sum(size for name, size in memory.host.items() if name != "gradients")
    copies = 1 if parallel_dims.is_sharded else parallel_dims.shard * parallel_dims.context
    return kept // (parallel_dims.replicate * copies)

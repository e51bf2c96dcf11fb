"""Counts the bytes that this process sends, by purpose.

    with CommCounter() as counter:
        model(x).sum().backward()
    counter.sent["gather"]

Every collective of torch.distributed, FSDP and DTensor goes through torch's dispatcher, where a `CommCounter`
reads its tensors. A collective on n bytes counts as what one rank of N sends in a ring:

    all-gather of n bytes from each rank          (N - 1) n
    reduce-scatter, all-to-all of n bytes         (N - 1) n / N
    all-reduce of n bytes                         2 (N - 1) n / N
    broadcast, send                               n

They are counted under the tag set by the caller (`collectives.comm_tag`); without one, under "gather" for an
all-gather, "reduce" for a reduce-scatter or, in a backward pass, an all-reduce (FSDP2's over replicas),
"activations" for a send, and "other".
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.quantization.state.gradient_state import NarrowGradient
from narrowgauge.system.collectives import current_comm_tag
from narrowgauge.system.torch_compat import TorchDispatchMode, group_of_collective, is_in_backward


class CommCounter(TorchDispatchMode):
    """Counts the bytes that this process sends inside its `with` block.

    Attributes:
        sent: bytes by tag.
        calls: number of collectives by tag.
        by_ranks: bytes by (tag, the ranks of the group in order).
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.by_ranks: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run every operation unchanged, and count collectives."""
        if NarrowGradient in types:  # what it does with its codes comes here as well
            return NotImplemented
        if func.namespace == "c10d":
            self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: Sequence[Any]) -> None:
        """Count one collective, an operation of c10d with its arguments."""
        name = func.name().partition("::")[2]
        group = group_of_collective(args)
        # what it reads is the second of (output, input), or the list that it updates in place
        read = args[1] if "_base_" in name or name.startswith("allgather_") else args[0]
        tensors, ranks = [read] if isinstance(read, torch.Tensor) else read, group.size()
        size = sum(t.numel() * t.element_size() for t in tensors)
        default = "other"
        if name.startswith(("_allgather_base_", "allgather_")):
            default, size = "gather", (ranks - 1) * size
        elif name.startswith(("_reduce_scatter_base_", "alltoall_base_")):
            default, size = ("reduce" if "reduce" in name else default), (ranks - 1) * size // ranks
        elif name.startswith("allreduce_"):
            default, size = ("reduce" if is_in_backward() else default), 2 * (ranks - 1) * size // ranks
        elif name == "send":
            default = "activations"
        elif not name.startswith("broadcast_"):
            return  # barriers, and collectives that this package does not use
        tag = current_comm_tag() or default
        self.sent[tag] += size
        self.calls[tag] += 1
        self.by_ranks[tag, tuple(dist.get_process_group_ranks(group))] += size

"""How many bytes does this process send, and for what?

    with Traffic() as traffic:
        model(x).sum().backward()
    traffic.sent["gather"]

Every collective of torch.distributed goes through torch's dispatcher, those of FSDP and DTensor too, where a
`CommCounter` reads its tensors. What a rank of N sends for a tensor of n bytes is what a ring sends:

    all-gather of n bytes from each rank          (N - 1) n
    reduce-scatter, all-to-all of n bytes         (N - 1) n / N
    all-reduce of n bytes                         2 (N - 1) n / N
    broadcast, send                               n

It is counted under what it is for: "gather" (weights), "reduce" (gradients), "activations", "amax" (agreement
on scales), where the caller has said so by `sending`; else under "gather" for an all-gather, "reduce" for a
reduce-scatter, "activations" for what one process sends to another, and "other".
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.quantization.purpose import current_comm_tag


class CommCounter(TorchDispatchMode):
    """Counts what this process sends while it is entered.

    Attributes:
        sent: bytes by purpose.
        calls: collectives by purpose.
        by_ranks: bytes by (purpose, the ranks that talk, in order).
    """

    def __init__(self) -> None:
        """Nothing sent yet."""
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.by_ranks: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let everything pass, and count collectives."""
        if func.namespace == "c10d":
            self._count(func.name().partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        group = _group(args)
        tensors, ranks = _inputs(args, reads_second="_base_" in name), group.size()
        size = sum(t.numel() * t.element_size() for t in tensors)
        kind = "other"
        if name.startswith("_allgather_base_"):
            kind, size = "gather", (ranks - 1) * size
        elif name.startswith(("_reduce_scatter_base_", "alltoall_base_")):
            kind, size = ("reduce" if "reduce" in name else kind), (ranks - 1) * size // ranks
        elif name.startswith("allreduce_"):
            size = 2 * (ranks - 1) * size // ranks
        elif name == "send":
            kind = "activations"
        elif not name.startswith("broadcast_"):
            return  # barriers, and what nothing here is counted by
        self.sent[current_comm_tag() or kind] += size
        self.calls[current_comm_tag() or kind] += 1
        self.by_ranks[current_comm_tag() or kind, tuple(dist.get_process_group_ranks(group))] += size


def _inputs(args: Sequence[Any], reads_second: bool) -> list[torch.Tensor]:
    """What a collective reads: the second of (output, input), or the list that it works on."""
    first = args[1] if reads_second else args[0]
    return [first] if isinstance(first, torch.Tensor) else list(first)


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """Of a collective, which is handed to it boxed."""
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(boxed)

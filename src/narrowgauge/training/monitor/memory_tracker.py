"""The memory of one optimizer step, watched while it is taken.

What a GPU has given out is known to its allocator. A CPU's allocator does not tell, so there a step's
operations are watched: every tensor that appears counts until it is gone. Memory that torch takes from a
tensor and gives back to it (FSDP does, with whole weights) is looked at whenever processes talk, and when the
tensor is next used.
"""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.nn.sharded.gathered_weight import GatheredWeight, PlaceholderShard
from narrowgauge.torch_compat import TorchDispatchMode, local_tensor, storage_key, tree_iter


class MemoryTracker:
    """Watches one optimizer step of a session: `with watch: ...`, and `after_forward` in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.saved, self.peak = device, 0, 0
        self._operations = None if device.type == "cuda" else _Operations(device.type)
        self._start = 0

    def __enter__(self) -> "MemoryTracker":
        if self._operations is not None:
            self._operations.__enter__()
        else:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        return self

    def after_forward(self, loss: torch.Tensor | None = None) -> None:
        """Note what the first forward pass has left for the backward pass."""
        self.saved = self.saved or self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._operations is not None:
            self._operations.__exit__(kind, error, trace)
            self.peak = self._operations.peak
        else:
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._start

    def _now(self) -> int:
        if self._operations is not None:
            self._operations._look_at_all()
            return self._operations.alive
        return torch.cuda.memory_allocated(self.device) - self._start


class _Operations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, until their memory is given back."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.alive, self.peak = device, 0, 0
        self._known: dict[int, list[Any]] = {}  # finalizer, bytes of the step, bytes from before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._look_at_all()
        self._see((args, kwargs), counts=False)  # what was there before
        out = func(*args, **kwargs)
        self._see(out, counts=True)
        return out

    def _see(self, tree: Any, counts: bool) -> None:
        for leaf in tree_iter(tree):
            t = _with_memory(leaf)
            if t is None or t.device.type != self.device:
                continue
            storage = t.untyped_storage()
            key, size = storage_key(storage), storage.nbytes()
            if key not in self._known:
                whose = weakref.finalize(storage, self._forget, key)
                self._known[key] = [whose, size if counts else 0, 0 if counts else size]
                self._grow(size if counts else 0)
            else:
                self._look_again(self._known[key], size)

    def _look_again(self, known: list[Any], size: int) -> None:
        """Count what a tensor has been given since, or lost."""
        _, counted, before = known
        if size != counted + before:
            known[1], known[2] = size, 0  # memory that it was given in the step, all of it
            self._grow(size - counted)

    def _grow(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _look_at_all(self) -> None:
        for known in list(self._known.values()):
            alive = known[0].peek()
            if alive is not None:
                self._look_again(known, alive[0].nbytes())

    def _forget(self, key: int) -> None:
        self.alive -= self._known.pop(key)[1]


def _with_memory(leaf: Any) -> torch.Tensor | None:
    """The tensor that has the memory of what an operation was given."""
    if isinstance(leaf, DTensor):
        return _with_memory(local_tensor(leaf))
    if isinstance(leaf, GatheredWeight):
        return leaf.numbers
    return leaf if isinstance(leaf, torch.Tensor) and not isinstance(leaf, PlaceholderShard) else None

"""Measures the memory of one optimizer step.

On a GPU the caching allocator knows the allocated bytes. A CPU's allocator has no such counter, so a dispatch
mode intercepts the operations of the step and counts every new tensor until it is freed. FSDP resizes the
storage of gathered weights in place; such storages are measured again at every collective, and when the
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
    """Context manager around one optimizer step; call `after_forward` within it."""

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
        """Record the bytes that the first forward pass keeps for the backward pass."""
        self.saved = self.saved or self._now()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._operations is not None:
            self._operations.__exit__(exc_type, error, trace)
            self.peak = self._operations.peak
        else:
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._start

    def _now(self) -> int:
        if self._operations is not None:
            self._operations.update_all()
            return self._operations.alive
        return torch.cuda.memory_allocated(self.device) - self._start


class _Operations(TorchDispatchMode):
    """Counts the bytes of tensors that operations create, until their storage is freed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.alive, self.peak = device, 0, 0
        self._known: dict[
            int, list[Any]
        ] = {}  # by storage: finalizer, bytes allocated in the step, bytes from before it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.update_all()
        self._count((args, kwargs), counts=False)  # tensors from before the step
        out = func(*args, **kwargs)
        self._count(out, counts=True)
        return out

    def _count(self, tree: Any, counts: bool) -> None:
        for leaf in tree_iter(tree):
            t = _with_memory(leaf)
            if t is None or t.device.type != self.device:
                continue
            storage = t.untyped_storage()
            key, size = storage_key(storage), storage.nbytes()
            if key not in self._known:
                finalizer = weakref.finalize(storage, self._forget, key)
                self._known[key] = [finalizer, size if counts else 0, 0 if counts else size]
                self._grow(size if counts else 0)
            else:
                self._update(self._known[key], size)

    def _update(self, known: list[Any], size: int) -> None:
        """Count the change of a storage's size since it was last seen."""
        _, counted, before = known
        if size != counted + before:
            known[1], known[2] = size, 0  # all of it was allocated in the step
            self._grow(size - counted)

    def _grow(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def update_all(self) -> None:
        """Count the changes of all known storages."""
        for known in list(self._known.values()):
            alive = known[0].peek()
            if alive is not None:
                self._update(known, alive[0].nbytes())

    def _forget(self, key: int) -> None:
        self.alive -= self._known.pop(key)[1]


def _with_memory(leaf: Any) -> torch.Tensor | None:
    """The tensor that holds the storage of an operation's argument or result; None without one."""
    if isinstance(leaf, DTensor):
        return _with_memory(local_tensor(leaf))
    if isinstance(leaf, GatheredWeight):
        return leaf.numbers
    return leaf if isinstance(leaf, torch.Tensor) and not isinstance(leaf, PlaceholderShard) else None

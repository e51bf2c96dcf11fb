"""Bytes alive: from the operation that makes a tensor until the tensor's storage is freed.

FSDP resizes the storage of gathered weights in place. Such storages are measured again at every collective
and at the tensor's next use.
"""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import NarrowTensor
from narrowgauge.quantization.state.gradient_state import NarrowGradient
from narrowgauge.system.torch_compat import local_tensor, storage_key


class _Storage:
    """A live storage: its bytes since `LiveBytes.begin`, and its bytes from before."""

    __slots__ = ("before", "new", "reference")

    def __init__(self, reference: Any, new: int, before: int) -> None:
        self.reference, self.new, self.before = reference, new, before


class LiveBytes:
    """Counts the bytes of tensors on one type of device.

    Attributes:
        alive: the bytes alive now, in storages allocated since `begin`.
        peak: the most bytes that were alive since `begin` or `begin_peak`.
    """

    def __init__(self, device: str, allocation: int = 1) -> None:
        """Count storages on a type of device, in whole multiples of `allocation` bytes."""
        self.device, self.allocation = device, allocation
        self.alive = self.peak = 0
        self._storages: dict[int, _Storage] = {}

    def begin(self) -> None:
        """Count from here on; storages alive now belong to the time before."""
        for known in self._storages.values():
            known.before, known.new = known.before + known.new, 0
        self.alive = 0
        self.begin_peak()

    def begin_peak(self) -> None:
        """Record the peak from here on."""
        self.peak = self.alive

    def see(self, tree: Any, is_new: bool) -> None:
        """Count the tensors of an operation: its results, which are new, or its arguments, which are not."""
        if isinstance(tree, torch.Tensor):
            self._see(tree, is_new)
        elif isinstance(tree, (list, tuple)):
            for branch in tree:
                if branch is not None and not isinstance(branch, (int, float, str)):
                    self.see(branch, is_new)
        elif isinstance(tree, dict):
            for branch in tree.values():
                self.see(branch, is_new)

    def _see(self, tensor: torch.Tensor, is_new: bool) -> None:
        t = _with_memory(tensor)
        if t is None or t.device.type != self.device:
            return
        storage = t.untyped_storage()
        key, size = storage_key(storage), -(-storage.nbytes() // self.allocation) * self.allocation
        known = self._storages.get(key)
        if known is not None:
            if size != known.new + known.before:
                self._resize(known, size)
            return
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._storages[key] = _Storage(reference, size if is_new else 0, 0 if is_new else size)
        if is_new:
            self._grow(size)

    def _resize(self, known: _Storage, size: int) -> None:
        """Count a storage whose size changed; all of it was allocated since."""
        grown, known.new, known.before = size - known.new, size, 0
        self._grow(grown)

    def _grow(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _forget(self, key: int) -> None:
        self.alive -= self._storages.pop(key).new

    def update_all(self) -> None:
        """Update the sizes of all storages."""
        for known in list(self._storages.values()):
            storage = known.reference()
            if storage is not None:
                size = -(-storage.nbytes() // self.allocation) * self.allocation
                if size != known.new + known.before:
                    self._resize(known, size)


def _with_memory(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor that owns the storage of an operation's argument or result; None if there is none."""
    if type(x) is torch.Tensor:
        return x
    if isinstance(x, DTensor):
        return _with_memory(local_tensor(x))
    if isinstance(x, GatheredWeight):
        return x.numbers
    return None if isinstance(x, NarrowTensor | NarrowGradient) else x  # their codes are seen elsewhere

"""Bytes alive: from the operation that makes a tensor until the tensor's storage is freed.

FSDP resizes the storage of gathered weights in place. Such storages are measured again at every collective
and at the tensor's next use.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import NarrowTensor
from narrowgauge.quantization.state.gradient_state import NarrowGradient
from narrowgauge.system.torch_compat import local_tensor, storage_key

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class _Storage:
    """A live storage."""

    reference: Any
    new: int  # bytes that an operation allocated
    before: int  # bytes that were there before


class LiveBytes:
    """Counts the bytes of tensors on one type of device.

    Attributes:
        alive: the bytes alive now, in storages that operations allocated.
        peak: the most bytes that were alive, since `begin_peak` if it was called.
    """

    def __init__(self, device: str, allocation: int = 1) -> None:
        """Count storages on a type of device, in whole multiples of `allocation` bytes."""
        self.is_on_meta, self.allocation = device == "meta", allocation
        self.alive = self.peak = 0
        self._storages: dict[int, _Storage] = {}

    def begin_peak(self) -> None:
        """Record the peak from here on."""
        self.peak = self.alive

    def see(self, values: Sequence[Any], is_new: bool) -> None:
        """Count the tensors of an operation: its results, which are new, or its arguments, which are not."""
        for value in values:
            if type(value) in _PLAIN:
                t = value
            elif isinstance(value, (list, tuple)):
                self.see(value, is_new)
                continue
            elif (t := _with_memory(value)) is None:
                continue
            if t.is_meta is not self.is_on_meta:
                continue
            storage = t.untyped_storage()
            key, size = storage_key(storage), -(-storage.nbytes() // self.allocation) * self.allocation
            known = self._storages.get(key)
            if known is None:
                self._begin(storage, key, size, is_new)
            elif size != known.new + known.before:
                self._resize(known, size)

    def _begin(self, storage: torch.UntypedStorage, key: int, size: int, is_new: bool) -> None:
        reference = weakref.ref(storage, lambda _: self._grow(-self._storages.pop(key).new))
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

    def update_all(self) -> None:
        """Update the sizes of all storages."""
        for known in list(self._storages.values()):
            storage = known.reference()
            if storage is not None:
                size = -(-storage.nbytes() // self.allocation) * self.allocation
                if size != known.new + known.before:
                    self._resize(known, size)


def _with_memory(x: Any) -> torch.Tensor | None:
    """The tensor that owns the storage of an operation's argument or result; None if there is none."""
    if isinstance(x, DTensor):
        x = local_tensor(x)
    if isinstance(x, GatheredWeight):
        return x.elements
    # the codes of narrow tensors are seen elsewhere
    return x if isinstance(x, torch.Tensor) and not isinstance(x, NarrowTensor | NarrowGradient) else None

"""Global memory, which is the bytes of torch tensors, and the shared memory of blocks.

An address outside every tensor, or not a multiple of what is accessed, is refused: a GPU would fault, or
read what belongs to others.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ptx.parse import Refused

Array = np.ndarray[Any, Any]
#: What memory and registers hold before they are written.
POISON = 0xA5


class Global:
    """Tensors by address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                spans[storage.data_ptr()] = storage.nbytes()
        self.starts = np.array(sorted(spans), dtype=np.uint64)
        self.regions = [
            np.ctypeslib.as_array((ctypes.c_uint8 * spans[int(start)]).from_address(int(start)))
            for start in self.starts
        ]

    def _places(self, address: Array, size: int) -> Iterable[tuple[Array, Array | slice, Array]]:
        """For each tensor accessed: its elements of `size` bytes, which of the addresses, the indices."""
        at = np.searchsorted(self.starts, address, side="right") - 1
        for region in np.unique(at):
            mine = slice(None) if at[0] == region and (at == region).all() else at == region
            start = self.starts[max(region, 0)]
            offset = (address[mine] - start).astype(np.int64)
            if region < 0 or (offset + size > len(self.regions[region])).any():
                raise Refused("an address that is in no tensor")
            if (address[mine] % np.uint64(size)).any() or int(start) % size:
                raise Refused(f"an address that is not a multiple of {size} bytes")
            memory = self.regions[region]
            yield memory[: len(memory) // size * size].view(f"u{size}"), mine, offset // size

    def load(self, address: Array, size: int) -> Array:
        """The `size` bytes at each address (uint64)."""
        result = np.empty(len(address), dtype=f"u{size}")
        for memory, mine, index in self._places(address, size):
            result[mine] = memory[index]
        return result

    def store(self, address: Array, value: Array) -> None:
        """Write values; the last thread wins where several write to one address."""
        for memory, mine, index in self._places(address, value.dtype.itemsize):
            memory[index] = value[mine]

    def update(self, address: Array, value: Array, function: Any) -> None:
        """Apply a ufunc of (the value there, `value`), for one thread after the other."""
        for memory, mine, index in self._places(address, value.dtype.itemsize):
            function.at(memory.view(value.dtype), index, value[mine])


class Shared:
    """The shared memory of some blocks.

    Two warps that access a byte between the same two barriers, one of them to write it, do not wait for each
    other; that is refused. This executor runs all warps in step, so that its result would look right.
    """

    MANY = -2  # several warps

    def __init__(self, blocks: int, size: int, threads: int) -> None:
        self.size, self.threads = size, threads
        self.bytes = np.full(blocks * size, POISON, dtype=np.uint8)
        self.writer, self.reader = (np.full(blocks * size, -1, dtype=np.int32) for _ in range(2))

    def barrier(self, blocks: Array) -> None:
        """The threads of some blocks have waited for each other."""
        for seen in (self.writer, self.reader):
            seen.reshape(len(blocks), self.size)[blocks] = -1

    def _places(self, address: Array, lanes: Array, size: int) -> tuple[Array, Array]:
        """(places of all bytes [lanes, size], warps [lanes, 1])."""
        if (address + size > self.size).any() or (address % size).any():
            raise Refused(f"an address of shared memory beyond its {self.size} bytes, or not aligned")
        block = lanes // self.threads
        first = block * self.size + address.astype(np.int64)
        return first[:, None] + np.arange(size), (lanes // 32 % (self.threads // 32))[:, None]

    def load(self, address: Array, lanes: Array, size: int) -> Array:
        """The `size` bytes at each address, for the threads `lanes`."""
        places, warp = self._places(address, lanes, size)
        writer = self.writer[places]
        if ((writer != -1) & (writer != warp)).any():
            raise Refused("a race: a thread reads what another warp wrote, without a barrier between")
        reader = self.reader[places]
        self.reader[places] = np.broadcast_to(warp, places.shape)
        # Where several warps read a byte now, or have before.
        is_shared = (self.reader[places] != warp) | (reader != -1) & (reader != warp)
        self.reader[places[is_shared]] = self.MANY
        return np.ascontiguousarray(self.bytes[places]).view(f"u{size}")[:, 0]

    def store(self, address: Array, lanes: Array, value: Array) -> None:
        """Store a value of each of the threads `lanes`; several warps may write the same."""
        places, warp = self._places(address, lanes, value.dtype.itemsize)
        new = np.ascontiguousarray(value).view(np.uint8).reshape(places.shape)
        writer, reader = self.writer[places], self.reader[places]
        is_other = (writer != -1) & (writer != warp)
        if (is_other & (self.bytes[places] != new)).any() or ((reader != -1) & (reader != warp)).any():
            raise Refused("a race: a thread writes what another warp accessed, without a barrier between")
        self.bytes[places] = new
        self.writer[places] = np.broadcast_to(warp, places.shape)
        is_other |= self.writer[places] != warp
        if (self.bytes[places] != new).any():
            raise Refused("a race: two threads write different values to one byte")
        self.writer[places[is_other]] = self.MANY

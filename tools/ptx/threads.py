"""The threads of some blocks: their registers as arrays with one element a thread.

Threads run in step; of those that have parted some run, and the registers of the others keep their values. An
array of one element is a register that all threads share.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptx.memory import POISON, Array, Global, Shared
from ptx.parse import Kernel, Refused
from ptx.types import BITS, PACKED, TYPES, width

Step = Callable[["Threads"], None]
#: The name of a block's shared memory in Triton's code; it begins at 0.
SHARED = "global_smem"


def unwritten(dtype: Any) -> Array:
    """What a register holds at first: any value."""
    if np.dtype(dtype).kind == "b":
        return np.zeros(1, dtype=bool)
    return np.full(np.dtype(dtype).itemsize, POISON, dtype=np.uint8).view(dtype)


class Threads:
    """Some blocks of a grid, all of their threads."""

    def __init__(
        self, kernel: Kernel, blocks: range, grid: Sequence[int], shared: int, memory: Global
    ) -> None:
        self.blocks, self.threads = len(blocks), kernel.threads
        self.count = self.blocks * self.threads
        self.registers: dict[str, Array] = {}
        self.mask: Array | None = None  # those that run; None for all
        self.memory, self.shared = memory, Shared(self.blocks, shared, self.threads)
        block = np.repeat(np.arange(blocks.start, blocks.stop), self.threads)
        thread = np.tile(np.arange(self.threads), self.blocks)
        x, y, z = grid
        special = {
            "%tid.x": thread, "%laneid": thread % 32, "%ntid.x": self.threads,
            "%ctaid.x": block % x, "%ctaid.y": block // x % y, "%ctaid.z": block // (x * y),
            "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z,
        }  # fmt: skip
        self.special = {k: np.atleast_1d(np.asarray(v, dtype=np.uint32)) for k, v in special.items()}

    def all(self, value: Array) -> Array:
        """A register with one element for each thread."""
        return value if len(value) == self.count else np.repeat(value, self.count)

    def running(self) -> Array:
        """The indices of the threads that run."""
        return np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask)

    def scattered(self, value: Array, lanes: Array) -> Array:
        """Values of the threads `lanes` at their places among all."""
        if len(lanes) == self.count:
            return value
        result = np.zeros(self.count, dtype=value.dtype)
        result[lanes] = value
        return result

    def write(self, name: str, bits: Array) -> None:
        """Set a register of the threads that run."""
        if self.mask is not None:
            before = self.registers.get(name)
            bits = np.where(self.mask, bits, unwritten(bits.dtype) if before is None else before)
        self.registers[name] = bits

    def whole_warps(self) -> bool:
        """Whether no warp runs in part."""
        if self.mask is None:
            return True
        warps = self.mask.reshape(-1, 32)
        return bool((warps.all(1) == warps.any(1)).all())


def reader(kernel: Kernel, operand: Any, kind: str) -> Callable[[Threads], Array]:
    """How to read an operand as a type."""
    if not isinstance(operand, str):
        raise Refused(f"{kernel.name}: {operand} where one register is read")
    if not operand.startswith("%") and operand not in kernel.registers:
        constant = _constant(operand, kind)
        return lambda threads: constant
    if "." in operand or operand == "%laneid":
        if kind not in ("u32", "b32", "s32"):
            raise Refused(f"{kernel.name}: {operand} as {kind}")
        return lambda threads: threads.special[operand]
    declared = BITS[kernel.type_of(operand)]
    count, of = PACKED.get(kind, (1, kind))
    wanted, size = TYPES[of], width(kind)
    held = np.dtype(declared).itemsize
    if held < size or (declared is np.bool_) != (wanted is np.bool_):
        raise Refused(f"{kernel.name}: {operand} is too narrow for {kind}")

    def read(threads: Threads) -> Array:
        value = threads.registers.get(operand)
        if value is None:  # as LLVM lets code do where a value does not matter
            value = unwritten(declared)
        if held > size:
            value = value.astype(f"u{size}")
        return value[:, None].view(wanted) if count > 1 else value.view(wanted)

    return read


def _constant(text: str, kind: str) -> Array:
    size = width(kind)
    if text == SHARED:
        bits = 0
    elif found := re.fullmatch(r"0f([0-9A-Fa-f]{8})", text):
        bits = int(found[1], 16)
    elif re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        bits = int(text.rstrip("U"), 0)
    else:
        raise Refused(f"{text} is not a known constant")
    if kind == "pred":
        return np.array([bits != 0])
    count, of = PACKED.get(kind, (1, kind))
    array = np.array([bits & (1 << 8 * size) - 1], dtype=f"u{size}")
    return array[:, None].view(TYPES[of]) if count > 1 else array.view(TYPES[of])


def writer(kernel: Kernel, operand: Any, kind: str) -> Callable[[Threads, Array], None]:
    """How to write a result of a type: extended to the register, with its sign if the type has one."""
    if operand == "_":
        return lambda threads, value: None
    declared = np.dtype(BITS[kernel.type_of(operand)])
    if declared.itemsize < width(kind) or (declared.kind == "b") != (kind == "pred"):
        raise Refused(f"{kernel.name}: {operand} is too narrow for {kind}")
    signed = np.dtype(f"i{declared.itemsize}")

    def write(threads: Threads, value: Array) -> None:
        if value.ndim > 1:
            value = np.ascontiguousarray(value).view(declared)[:, 0]
        elif value.dtype.itemsize == declared.itemsize:
            value = np.ascontiguousarray(value).view(declared)
        elif kind.startswith("s"):
            value = value.astype(signed).view(declared)
        else:
            value = value.view(f"u{value.dtype.itemsize}").astype(declared)
        threads.write(operand, value)

    return write


def condition(kernel: Kernel, guard: str) -> Callable[[Threads], Array]:
    """The threads for which a guard `%p` or `!%p` holds; of those that run."""
    read = reader(kernel, guard.removeprefix("!"), "pred")

    def holds(threads: Threads) -> Array:
        value = read(threads)
        value = threads.all(~value if guard.startswith("!") else value)
        return value if threads.mask is None else value & threads.mask

    return holds

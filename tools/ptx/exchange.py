"""Instructions that access memory, wait, or exchange values between threads."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx import warps
from ptx.memory import Array
from ptx.parse import Instruction, Kernel, Refused
from ptx.threads import SHARED, Step, Threads, reader, writer
from ptx.types import width

_ACCESS = re.compile(r"(ld|st)\.(global|shared)(?:\.v([24]))?\.b(8|16|32|64)")
_MATRIX = re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
_MATRIX_ROW = 16  # bytes


def step_of(kernel: Kernel, instruction: Instruction) -> Step:
    """What an instruction does; one that is not known is refused."""
    opcode, operands = instruction.opcode, instruction.operands
    if found := _ACCESS.fullmatch(opcode):
        access = _load if found[1] == "ld" else _store
        return access(kernel, operands, found[2], int(found[3] or 1), int(found[4]) // 8)
    if found := _MATRIX.fullmatch(opcode):
        if found[1] == "ld":
            return _load_matrices(kernel, operands, int(found[2]), bool(found[3]))
        if not found[3]:
            return _store_matrices(kernel, operands, int(found[2]))
    if opcode in OTHERS:
        return OTHERS[opcode](kernel, operands)
    raise Refused(f"{kernel.name}: {opcode} is an instruction that this executor does not know")


def _address(kernel: Kernel, operand: Any, space: str) -> Callable[[Threads], Array]:
    found = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", operand)
    if found is None:
        raise Refused(f"{kernel.name}: the address {operand}")
    bits = 64 if space == "global" else 32
    offset = np.array([int(found[2] or 0) & (1 << bits) - 1], dtype=f"u{bits // 8}")
    if found[1] == SHARED:
        return lambda threads: offset
    read = reader(kernel, found[1], f"b{bits}")
    return lambda threads: read(threads) + offset


def _vector(operand: Any, count: int) -> tuple[str, ...]:
    vector = operand if isinstance(operand, tuple) else (operand,)
    if len(vector) != count:
        raise Refused(f"{operand} for {count} registers")
    return vector


def _aligned(address: Array, size: int) -> Array:
    if (address % address.dtype.type(size)).any():
        raise Refused(f"an address that is not a multiple of {size} bytes")
    return address


def _load(kernel: Kernel, operands: Any, space: str, count: int, size: int) -> Step:
    writes = [writer(kernel, t, f"b{8 * size}") for t in _vector(operands[0], count)]
    address = _address(kernel, operands[1], space)

    def load(threads: Threads) -> None:
        at = address(threads)
        if is_one := threads.mask is None and len(at) == 1 and space == "global":
            lanes = np.zeros(1, dtype=np.int64)
        else:
            lanes = threads.running()
            at = threads.all(at)[lanes]
        _aligned(at, count * size)
        parts = []
        for i in range(count):
            where = at + at.dtype.type(i * size)
            if space == "global":
                found = threads.memory.load(where, size)
            else:
                found = threads.shared.load(where, lanes, size)
            parts.append(found if is_one else threads.scattered(found, lanes))
        for write, part in zip(writes, parts, strict=True):
            write(threads, part)

    return load


def _store(kernel: Kernel, operands: Any, space: str, count: int, size: int) -> Step:
    address = _address(kernel, operands[0], space)
    reads = [reader(kernel, s, f"b{8 * size}") for s in _vector(operands[1], count)]

    def store(threads: Threads) -> None:
        lanes = threads.running()
        at = _aligned(threads.all(address(threads))[lanes], count * size)
        for i, read in enumerate(reads):
            where, value = at + at.dtype.type(i * size), threads.all(read(threads))[lanes]
            if space == "global":
                threads.memory.store(where, value)
            else:
                threads.shared.store(where, lanes, value)

    return store


def _whole_warps(kernel: Kernel, threads: Threads) -> None:
    if not threads.whole_warps():
        raise Refused(f"{kernel.name}: a part of a warp exchanges values")


def _load_matrices(kernel: Kernel, operands: Any, count: int, is_transposed: bool) -> Step:
    writes = [writer(kernel, t, "b32") for t in _vector(operands[0], count)]
    address = _address(kernel, operands[1], "shared")

    def load(threads: Threads) -> None:
        _whole_warps(kernel, threads)
        lanes = threads.running()
        lanes = lanes[lanes % 32 < 8 * count]  # the others' addresses count for nothing
        at = _aligned(threads.all(address(threads))[lanes], _MATRIX_ROW)
        rows = np.zeros((threads.count, 8), dtype=np.uint16)
        for half in range(2):
            found = threads.shared.load(at + np.uint32(8 * half), lanes, 8)
            rows[lanes, 4 * half : 4 * half + 4] = found.view(np.uint16).reshape(-1, 4)
        for write, value in zip(writes, warps.load_matrices(rows, count, is_transposed), strict=True):
            write(threads, value)

    return load


def _store_matrices(kernel: Kernel, operands: Any, count: int) -> Step:
    address = _address(kernel, operands[0], "shared")
    reads = [reader(kernel, s, "b32") for s in _vector(operands[1], count)]

    def store(threads: Threads) -> None:
        _whole_warps(kernel, threads)
        rows = warps.store_matrices([threads.all(read(threads)) for read in reads])
        lanes = threads.running()
        lanes = lanes[lanes % 32 < 8 * count]
        at = _aligned(threads.all(address(threads))[lanes], _MATRIX_ROW)
        for half in range(2):
            value = np.ascontiguousarray(rows[lanes, 4 * half : 4 * half + 4]).view(np.uint64)[:, 0]
            threads.shared.store(at + np.uint32(8 * half), lanes, value)

    return store


def _shuffle(exchange: Any) -> Callable[[Kernel, Any], Step]:
    def step(kernel: Kernel, operands: Any) -> Step:
        target, *sources, members = operands
        if members != "-1":
            raise Refused(f"{kernel.name}: a shuffle of some threads of a warp")
        write, reads = writer(kernel, target, "b32"), [reader(kernel, s, "b32") for s in sources]

        def shuffle(threads: Threads) -> None:
            _whole_warps(kernel, threads)
            value, which, clamp = (threads.all(r(threads)) for r in reads)
            if (clamp != 31).any() or (which > 31).any():
                raise Refused(f"{kernel.name}: a shuffle within segments of a warp")
            write(threads, exchange(value, which))

        return shuffle

    return step


def _reduction(name: str) -> Callable[[Kernel, Any], Step]:
    def step(kernel: Kernel, operands: Any) -> Step:
        target, source, members = operands
        write, read, of = (
            writer(kernel, target, "b32"),
            reader(kernel, source, "b32"),
            reader(kernel, members, "b32"),
        )

        def reduce(threads: Threads) -> None:
            _whole_warps(kernel, threads)
            if (of(threads) != 0xFFFFFFFF).any():
                raise Refused(f"{kernel.name}: a reduction of some threads of a warp")
            write(threads, warps.of_warp(threads.all(read(threads)), name))

        return reduce

    return step


def _barrier(kernel: Kernel, operands: Any) -> Step:
    if operands != ("0",):
        raise Refused(f"{kernel.name}: the barrier {operands}")

    def wait(threads: Threads) -> None:
        here = np.ones(threads.count, bool) if threads.mask is None else threads.mask
        blocks = here.reshape(threads.blocks, -1)
        if (blocks.all(1) != blocks.any(1)).any():
            raise Refused(f"{kernel.name}: a part of a block waits at a barrier")
        threads.shared.barrier(blocks.all(1))

    return wait


def _warp_barrier(kernel: Kernel, operands: Any) -> Step:
    return lambda threads: _whole_warps(kernel, threads)  # which runs in step


def _update(kind: str, function: Any) -> Callable[[Kernel, Any], Step]:
    """`red`: one thread after the other changes a value of global memory, by a ufunc."""

    def step(kernel: Kernel, operands: Any) -> Step:
        address, read = _address(kernel, operands[0], "global"), reader(kernel, operands[1], kind)

        def update(threads: Threads) -> None:
            lanes = threads.running()
            at = _aligned(threads.all(address(threads))[lanes], width(kind))
            threads.memory.update(at, threads.all(read(threads))[lanes], function)

        return update

    return step


OTHERS: dict[str, Callable[[Kernel, Any], Step]] = {
    "shfl.sync.bfly.b32": _shuffle(warps.from_neighbour),
    "shfl.sync.idx.b32": _shuffle(warps.from_thread),
    "redux.sync.add.s32": _reduction("add.s32"),
    "redux.sync.max.s32": _reduction("max.s32"),
    "redux.sync.max.f32": _reduction("max.f32"),
    "bar.sync": _barrier,
    "bar.warp.sync": _warp_barrier,
    "red.global.gpu.relaxed.max.s32": _update("s32", np.maximum),
    "red.global.gpu.relaxed.add.u32": _update("u32", np.add),
}

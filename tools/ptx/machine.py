"""Runs a kernel: what each instruction does, and branches.

Where threads part, those at the earliest block of the code run first, so that they meet again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ptx import exchange
from ptx.conversions import CONVERSIONS
from ptx.floats import FLOATS
from ptx.integers import INTEGERS
from ptx.memory import Array, Global
from ptx.parse import Instruction, Kernel, Refused
from ptx.threads import Step, Threads, condition, reader, writer
from ptx.types import BITS, TYPES, Elementwise, width

ELEMENTWISE: Mapping[str, Elementwise] = INTEGERS | FLOATS | CONVERSIONS
#: Threads that run in step, at most, in whole blocks.
AT_ONCE = 8192


def _elementwise(kernel: Kernel, instruction: Instruction, does: Elementwise) -> Step:
    target, *sources = instruction.operands
    if len(sources) != len(does.sources):
        raise Refused(f"{kernel.name}: {instruction} has {len(sources)} sources")
    read = [reader(kernel, s, kind) for s, kind in zip(sources, does.sources, strict=True)]
    write, function = writer(kernel, target, does.result), does.function
    return lambda threads: write(threads, function(*[r(threads) for r in read]))


def _moved(kernel: Kernel, instruction: Instruction, kind: str) -> Step:
    """`mov` between a register and a vector of narrower ones, the first of which are the low bits."""
    target, source = instruction.operands
    vector = target if isinstance(target, tuple) else source
    part = f"b{8 * width(kind) // len(vector)}"
    if isinstance(target, tuple):
        read = reader(kernel, source, kind)
        writes = [writer(kernel, t, part) for t in target]

        def unpack(threads: Threads) -> None:
            parts = np.ascontiguousarray(read(threads))[:, None].view(BITS[part])
            for i, write in enumerate(writes):
                write(threads, np.ascontiguousarray(parts[:, i]))

        return unpack
    reads, write = [reader(kernel, s, part) for s in source], writer(kernel, target, kind)
    return lambda threads: write(threads, np.stack(np.broadcast_arrays(*[r(threads) for r in reads]), -1))


def step_of(kernel: Kernel, instruction: Instruction, parameters: Mapping[str, Array]) -> Step:
    """What an instruction does; one that no table names is refused."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode.startswith("mov.b") and any(isinstance(o, tuple) for o in operands):
        step = _moved(kernel, instruction, opcode[4:])
    elif f"{opcode} of {len(operands) - 1}" in ELEMENTWISE:
        step = _elementwise(kernel, instruction, ELEMENTWISE[f"{opcode} of {len(operands) - 1}"])
    elif opcode in ELEMENTWISE:
        step = _elementwise(kernel, instruction, ELEMENTWISE[opcode])
    elif opcode.startswith("ld.param."):
        kind, name = opcode.split(".")[2], operands[1].strip("[]")
        value = parameters[name].view(TYPES[kind]) if kind in TYPES else None
        if value is None:
            raise Refused(f"{kernel.name}: {instruction}")
        write = writer(kernel, operands[0], kind)
        step = lambda threads: write(threads, value)  # noqa: E731
    else:
        step = exchange.step_of(kernel, instruction)
    return _guarded(kernel, instruction.guard, step) if instruction.guard else step


def _guarded(kernel: Kernel, guard: str, step: Step) -> Step:
    holds = condition(kernel, guard)

    def run(threads: Threads) -> None:
        before = threads.mask
        mask = holds(threads)
        threads.mask = None if mask.all() else mask
        step(threads)
        threads.mask = before

    return run


Block = tuple[list[Step], Callable[[Threads], Array] | None, int | None]


def prepare(kernel: Kernel, parameters: Mapping[str, Array]) -> list[Block]:
    """For each block: its steps, who branches (None: all), and the target (None: the end; -1: no branch)."""
    blocks: list[Block] = []
    for instructions in kernel.blocks:
        last = instructions[-1] if instructions else None
        branch: tuple[Any, int | None] = (None, -1)
        if last is not None and last.opcode.split(".")[0] in ("bra", "ret", "exit"):
            instructions = instructions[:-1]
            who = condition(kernel, last.guard) if last.guard else None
            branch = who, kernel.labels[last.operands[0]] if last.operands else None
        blocks.append(([step_of(kernel, i, parameters) for i in instructions], *branch))
    return blocks


def _run(blocks: list[Block], threads: Threads) -> None:
    waiting = {0: np.ones(threads.count, dtype=bool)}

    def goes(to: int, who: Array) -> None:
        if who.any():
            waiting[to] = waiting[to] | who if to in waiting else who

    while waiting:
        at = min(waiting)
        here = waiting.pop(at)
        if at >= len(blocks):
            continue
        steps, who, to = blocks[at]
        threads.mask = None if here.all() else here
        for step in steps:
            step(threads)
        takes = np.zeros_like(here) if to == -1 else here if who is None else who(threads)
        if to is not None and to != -1:
            goes(to, takes)
        goes(at + 1, here & ~takes)


def run(kernel: Kernel, grid: Sequence[int], arguments: Sequence[Any], shared: int, memory: Global) -> None:
    """Run a kernel on a grid of blocks; arguments in the order of its parameters, numbers or addresses."""
    if len(arguments) != len(kernel.parameters):
        raise Refused(f"{kernel.name} has {len(kernel.parameters)} parameters, not {len(arguments)}")
    parameters = {}
    for (name, kind), value in zip(kernel.parameters, arguments, strict=True):
        if kind.startswith("f"):
            parameters[name] = np.array([value], dtype=TYPES[kind])
        else:
            bits = 8 * width(kind)
            parameters[name] = np.array([value & (1 << bits) - 1], dtype=f"u{bits // 8}")
    blocks = prepare(kernel, parameters)
    total = grid[0] * grid[1] * grid[2]
    at_once = max(1, AT_ONCE // kernel.threads)
    with np.errstate(all="ignore"):
        for first in range(0, total, at_once):
            some = range(first, min(first + at_once, total))
            _run(blocks, Threads(kernel, some, grid, shared, memory))

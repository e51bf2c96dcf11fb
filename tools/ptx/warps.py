"""What the threads of a warp, or of a block, tell each other.

Arrays have one element for each thread, 32 adjacent ones a warp. All threads of a warp take part: a mask of
less is refused.
"""

from functools import reduce

import numpy as np

from ptx.floats import greatest
from ptx.memory import Array


def from_neighbour(value: Array, distance: Array) -> Array:
    """`shfl.bfly`: the value of the thread whose index differs by the bits of `distance`."""
    return value[np.arange(len(value)) ^ distance.astype(np.int64)]


def from_thread(value: Array, which: Array) -> Array:
    """`shfl.idx`: the value of one thread of the warp."""
    return value[np.arange(len(value)) // 32 * 32 + which.astype(np.int64)]


def of_warp(value: Array, name: str) -> Array:
    """`redux`: the sum or maximum of a warp, of float32 of the numbers among them; for each thread."""
    warps = value.reshape(-1, 32)
    result = {
        "add.s32": lambda: warps.sum(1, dtype=np.uint32),
        "max.s32": lambda: warps.view(np.int32).max(1).view(np.uint32),
        "max.f32": lambda: reduce(greatest, warps.view(np.float32).T).view(np.uint32),
    }[name]()
    return np.repeat(result, 32)


def load_matrices(rows: Array, count: int, is_transposed: bool) -> list[Array]:
    """`ldmatrix`: of `rows` [threads, 8] uint16, of which thread 8m + r holds row r of matrix m.

    Returns:
        For each of `count` matrices what each thread gets: thread t the elements 2 (t % 4) and the next of
        row t // 4, or of that column.
    """
    matrices = rows.reshape(-1, 4, 8, 8)  # warp, matrix, row, column
    if is_transposed:
        matrices = matrices.swapaxes(2, 3)
    matrices = np.ascontiguousarray(matrices)
    return [matrices[:, m].reshape(-1, 32, 2).view(np.uint32).reshape(-1) for m in range(count)]


def store_matrices(values: list[Array]) -> Array:
    """`stmatrix`, the inverse: rows [threads, 8] uint16, of the threads that hold addresses (others: 0)."""
    warps = len(values[0]) // 32
    rows = np.zeros((warps, 4, 8, 8), dtype=np.uint16)
    for m, value in enumerate(values):
        rows[:, m] = np.ascontiguousarray(value).view(np.uint16).reshape(warps, 8, 8)
    return rows.reshape(-1, 8)

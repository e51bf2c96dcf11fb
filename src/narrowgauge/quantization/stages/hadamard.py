"""The Hadamard transform along a GEMM's contraction: spreads outliers, leaves the product unchanged.

With H the Sylvester matrix of size n (H^T H = n I) and D a diagonal of signs, x -> x D H / sqrt(n) is
orthogonal, so transforming both operands along the contraction leaves their product as it was, while one
large element becomes n medium ones that a narrow format represents better. The signs keep the transform from
mapping a constant row to a single spike. For n = 16 they are the fixed ones of TransformerEngine's NVFP4
recipe.

The arithmetic also follows TransformerEngine: x times the matrix in x's dtype, accumulated in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from narrowgauge.devices import imagined, is_shape_only
from narrowgauge.errors import UserError

if TYPE_CHECKING:
    import torch

# TransformerEngine, custom_recipes/reference_nvfp4.py: one sign vector for every tensor.
SIGNS = {16: (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)}


@cache
def _matrix(size: int) -> tuple[tuple[float, ...], ...]:
    """H / sqrt(size), row by row: H[i][j] = (-1)^popcount(i & j)."""
    norm = math.sqrt(size)
    return tuple(tuple((-1) ** (i & j).bit_count() / norm for j in range(size)) for i in range(size))


def transform(size: int, signs: torch.Tensor | Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The matrix D H / sqrt(size) that rows are multiplied by, in the dtype and on the device of `like`."""
    import torch

    if isinstance(signs, torch.Tensor):
        return signs.to(like.device, like.dtype).unsqueeze(-1) * _constant(size, (1,) * size, like)
    return _constant(size, tuple(signs) or SIGNS.get(size, (1,) * size), like)


_KEPT: dict[tuple[Any, ...], torch.Tensor] = {}


def _constant(size: int, signs: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """D H / sqrt(size) for these signs, cached: a copy to a GPU would wait for everything in its queue.

    Tensors without storage, or made by a compiler, belong to their context and are not cached.
    """
    import torch

    key = (size, signs, like.dtype, like.device, imagined(like.device))
    is_plain = not torch.compiler.is_compiling() and type(like) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and key in _KEPT:
        return _KEPT[key]
    rows = [[sign * h for h in row] for sign, row in zip(signs, _matrix(size), strict=True)]
    with torch.inference_mode(False):  # so that any graph may use it
        constant = torch.tensor(rows, dtype=like.dtype, device=like.device)
    if is_plain and type(constant) is torch.Tensor and not is_shape_only(constant):
        _KEPT[key] = constant
    return constant


def hadamard(x: torch.Tensor, size: int, axis: int, signs: torch.Tensor | Sequence[int] = ()) -> torch.Tensor:
    """Transform a tensor along an axis, in groups.

    Args:
        x: A floating tensor.
        size: The elements of a group, a power of two.
        axis: The axis.
        signs: D, one +1 or -1 for each element of a group; () for the signs of the size.

    Returns:
        A tensor of x's dtype. The axis is padded with zeros to a multiple of `size`, and keeps that length.

    Raises:
        UserError: `size` is not a power of two.
    """
    import torch

    if size < 2 or size & (size - 1):
        raise UserError(f"a Hadamard transform of size {size}: the size must be a power of two, such as 16")
    matrix = transform(size, signs, x)
    axis %= x.ndim
    if missing := -x.shape[axis] % size:
        x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    groups = x.unflatten(axis, (-1, size))
    if axis == x.ndim - 1:
        return (groups @ matrix).flatten(-2)
    # Groups of rows are multiplied from the left, so that no tensor is transposed in memory.
    rows = groups.flatten(axis + 2)
    return (matrix.T @ rows).view(groups.shape).flatten(axis, axis + 1)

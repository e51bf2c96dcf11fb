"""What this process holds of a run's state, as pieces of the whole: what a checkpoint of many processes has.

A parameter's `part` says which rows and columns of it lie here. What is stored beside it follows: bytes that
hold several elements, scales of blocks and single numbers lie where the elements do that they belong to.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import product
from math import ceil

import torch

from narrowgauge.checkpoint import LocalTensor, LocalTensors
from narrowgauge.optim import local, part_of
from narrowgauge.quantization import ShardAxis, TensorShard


def local_tensors_of(
    groups: Mapping[str, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
) -> LocalTensors:
    """The pieces of tensors by group and name; names begin with that of the parameter they belong to."""
    return {
        group: {name: list(_cut(local(t), _part(name, parameters))) for name, t in named.items()}
        for group, named in groups.items()
    }


def _part(name: str, parameters: Mapping[str, torch.Tensor]) -> TensorShard | None:
    """Of the parameter `a.b.weight` for `a.b.weight`, `a.b.weight.m.codes` and `a.b.master.codes`."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        if (parameter := parameters.get(".".join(words[:end]))) is not None:
            return part_of(parameter)
        if words[end:][:1] in (["weight"], ["master"], ["grad"]):
            parameter = parameters.get(".".join([*words[:end], "weight"]))
            return None if parameter is None else part_of(parameter)
    return None


def _cut(stored: torch.Tensor, part: TensorShard | None) -> Iterator[LocalTensor]:
    """The pieces of a stored tensor that belongs to a part of a parameter."""
    if part is None or not stored.ndim:
        yield LocalTensor(stored, tuple(stored.shape), (0,) * stored.ndim)
        return
    axes = [_scaled(axis, n) for axis, n in zip(part.axes, stored.shape, strict=False)]
    axes += [ShardAxis(n, ((0, n),), ()) for n in stored.shape[len(axes) :]]
    shape = tuple(axis.size for axis in axes)
    for box in product(*(_segments(axis) for axis in axes)):
        here = tuple(slice(begin, begin + n) for begin, _, n in box)
        yield LocalTensor(stored[here], shape, tuple(start for _, start, _ in box))


def _segments(axis: ShardAxis) -> Iterator[tuple[int, int, int]]:
    """(where a segment begins in the local tensor, where in the global one, its length)."""
    begin = 0
    for start, length in axis.segments:
        yield begin, start, length
        begin += length


def _scaled(axis: ShardAxis, stored: int) -> ShardAxis:
    """An axis counted in what is stored: bytes of several elements, scales of blocks."""
    if not axis.groups or stored == axis.length:
        return axis if axis.groups else ShardAxis(stored, ((0, stored),), ())
    each = Fraction(axis.length, stored)
    segments = tuple((int(start / each), ceil(length / each)) for start, length in axis.segments)
    return ShardAxis(ceil(axis.size / each), segments, axis.groups)

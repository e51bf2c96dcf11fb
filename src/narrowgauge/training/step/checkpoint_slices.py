"""The tensors of this process as slices of global tensors, for checkpoints of several processes.

A parameter's `TensorShard` describes its local rows and columns. The tensors of its state are divided in the
same way: packed bytes, scales of blocks and scalars belong to the process of their elements.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import product
from math import ceil

import torch

from narrowgauge.checkpoint import LocalTensor, LocalTensors
from narrowgauge.quantization import ShardAxis, TensorShard, local_tensor, shard_of


def local_tensors_of(
    groups: Mapping[str, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
) -> LocalTensors:
    """The slices of tensors by group and name; a name begins with the name of the tensor's parameter."""
    return {
        group: {name: list(_slices(local_tensor(t), _shard(name, parameters))) for name, t in named.items()}
        for group, named in groups.items()
    }


def _shard(name: str, parameters: Mapping[str, torch.Tensor]) -> TensorShard | None:
    """The shard of `a.b.weight` for `a.b.weight`, `a.b.weight.m.codes` and `a.b.master.codes`."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        if (parameter := parameters.get(".".join(words[:end]))) is not None:
            return shard_of(parameter)
        if words[end:][:1] in (["weight"], ["master"], ["grad"]):
            parameter = parameters.get(".".join([*words[:end], "weight"]))
            return None if parameter is None else shard_of(parameter)
    return None


def _slices(stored: torch.Tensor, shard: TensorShard | None) -> Iterator[LocalTensor]:
    """The slices of a stored tensor whose parameter has this shard; None if it is not sharded."""
    if shard is None or not stored.ndim:
        yield LocalTensor(stored, tuple(stored.shape), (0,) * stored.ndim)
        return
    axes = [_stored_axis(axis, n) for axis, n in zip(shard.axes, stored.shape, strict=False)]
    axes += [ShardAxis(n, ((0, n),), ()) for n in stored.shape[len(axes) :]]
    shape = tuple(axis.size for axis in axes)
    for segments in product(*(_segments(axis) for axis in axes)):
        index = tuple(slice(begin, begin + n) for begin, _, n in segments)
        yield LocalTensor(stored[index], shape, tuple(start for _, start, _ in segments))


def _segments(axis: ShardAxis) -> Iterator[tuple[int, int, int]]:
    """(start in the local tensor, start in the global tensor, length) of each segment."""
    begin = 0
    for start, length in axis.segments:
        yield begin, start, length
        begin += length


def _stored_axis(axis: ShardAxis, stored: int) -> ShardAxis:
    """An axis in units of the stored tensor: packed bytes, or scales of blocks."""
    if not axis.groups or stored == axis.length:
        return axis if axis.groups else ShardAxis(stored, ((0, stored),), ())
    ratio = Fraction(axis.length, stored)  # elements of a stored unit
    segments = tuple((int(start / ratio), ceil(length / ratio)) for start, length in axis.segments)
    return ShardAxis(ceil(axis.size / ratio), segments, axis.groups)

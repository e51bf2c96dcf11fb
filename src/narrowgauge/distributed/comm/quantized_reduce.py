"""Gradients of all ranks added up in narrow numbers: the place `reduce`.

    reduce_scatter    of a buffer (ranks, shard): each rank gets its row of the sum       FSDP
    all_reduce        of a list of tensors: each rank gets all of every sum               replicas

Each tensor has a cast of its own (`WireFormat`). What is narrow travels in one all-to-all of bytes for the
whole bucket and is added in the order of a ring (`ring.py`), under scales that one all-reduce agreed on
(`shared_scales.py`); what is fp32 travels by torch's own collectives. The all-reduce of narrow numbers is a
reduce-scatter and an all-gather of the sums, in the same numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from narrowgauge.collectives import Group, reduce_scatter_rows
from narrowgauge.distributed.comm.ring_reduce import gather_chunks, ring_reduce_scatter
from narrowgauge.distributed.comm.shared_scales import (
    WireFormat,
    count_cut,
    shared_scales,
    to_wire,
    update_prescale,
)
from narrowgauge.formats import Format, decode
from narrowgauge.quantization.purpose import comm_tag

Tensors = Sequence[torch.Tensor]


class QuantizedSum(NamedTuple):
    """A sum as it comes off the wire: uint8 codes and their 0-dim scale, or bf16 or fp16 values and None."""

    numbers: torch.Tensor
    scale: torch.Tensor | None
    element: Format

    def values(self) -> torch.Tensor:
        """In float32."""
        if self.scale is None:
            return self.numbers.float()
        return decode(self.numbers, self.element) * self.scale


def reduce_scatter(
    flat_RS: torch.Tensor, widths: Sequence[int], wires: Sequence[WireFormat], group: Group
) -> torch.Tensor:
    """This rank's shard of the sum over ranks, (S,), float32.

    Args:
        flat_RS: float32 (ranks, S); row r is what rank r will hold the sum of, shards of the tensors one
        after
            the other.
        widths: elements of each tensor in a row; their sum is S.
        wires: how each tensor travels.
        group: the ranks.
    """
    columns = flat_RS.split(list(widths), 1)
    out = flat_RS.new_empty(flat_RS.shape[1])
    shards = out.split(list(widths))
    wide, narrow = _apart(wires)
    if not narrow:
        return _sum_wide(flat_RS, group)
    if wide:
        own = _sum_wide(torch.cat([columns[i] for i in wide], 1), group)
        for i, shard in zip(wide, own.split([widths[i] for i in wide]), strict=True):
            shards[i].copy_(shard)
    sums = sum_quantized([columns[i] for i in narrow], [wires[i] for i in narrow], group)
    for i, found in zip(narrow, sums, strict=True):
        shards[i].copy_(found.values())
    return out


def all_reduce(tensors: Tensors, wires: Sequence[WireFormat], group: Group) -> None:
    """Put the sum over ranks in place of each float32 tensor."""
    wide, narrow = _apart(wires)
    if wide:
        together = torch.cat([tensors[i].reshape(-1) for i in wide])
        with comm_tag("reduce"):
            dist.all_reduce(together, group=group)
        for i, found in zip(wide, together.split([tensors[i].numel() for i in wide]), strict=True):
            tensors[i].copy_(found.view_as(tensors[i]))
    sums = all_reduce_quantized([tensors[i] for i in narrow], [wires[i] for i in narrow], group)
    for i, found in zip(narrow, sums, strict=True):
        tensors[i].copy_(found.values())


def all_reduce_quantized(tensors: Tensors, wires: Sequence[WireFormat], group: Group) -> list[QuantizedSum]:
    """The sums over ranks of float32 tensors, in the numbers of the wire and the tensors' shapes."""
    if not tensors:
        return []
    ranks = group.size()
    columns = [pad(t.reshape(-1), (0, -t.numel() % ranks)).view(ranks, -1) for t in tensors]
    sums = sum_quantized(columns, wires, group)
    every = gather_chunks([s.numbers for s in sums], group)
    return [
        s._replace(numbers=numbers[: t.numel()].view(t.shape))
        for s, numbers, t in zip(sums, every, tensors, strict=True)
    ]


def sum_quantized(columns_RW: Tensors, wires: Sequence[WireFormat], group: Group) -> list[QuantizedSum]:
    """This rank's row of the sum over ranks of each float32 tensor (ranks, width)."""
    scales = shared_scales(columns_RW, wires, group)
    every = list(zip(columns_RW, wires, [None if s is None else s[0] for s in scales], strict=True))
    numbers = [to_wire(x, wire, encode) for x, wire, encode in every]
    elements = dict.fromkeys(wire.cast.element for wire in wires)
    members = [[i for i, wire in enumerate(wires) if wire.cast.element == e] for e in elements]
    kinds = [
        (e, torch.cat([numbers[i] for i in which], 1)) for e, which in zip(elements, members, strict=True)
    ]
    learns = any(wire.prescale is not None for wire in wires)
    found: dict[int, QuantizedSum] = {}
    cut = [torch.zeros((), dtype=torch.int64, device=columns_RW[0].device)] * len(wires)
    for which, (e, _), (sums, overflow) in zip(
        members, kinds, ring_reduce_scatter(kinds, group, learns), strict=True
    ):
        lengths = [columns_RW[i].shape[1] for i in which]
        for i, part in zip(which, sums.split(lengths), strict=True):
            scale = scales[i]
            found[i] = QuantizedSum(part, None if scale is None else scale[1], e)
        if overflow is not None:
            for i, part in zip(which, overflow.split(lengths), strict=True):
                cut[i] = part.sum(dtype=torch.int64)
    if learns:
        before = [count_cut(*of_one) for of_one in every]
        update_prescale(wires, before, cut, [x.numel() for x in columns_RW], group)
    return [found[i] for i in range(len(wires))]


def _apart(wires: Sequence[WireFormat]) -> tuple[list[int], list[int]]:
    """The numbers of the wide ones, and of the narrow ones."""
    wide = [i for i, wire in enumerate(wires) if not wire.is_narrow]
    return wide, [i for i, wire in enumerate(wires) if wire.is_narrow]


def _sum_wide(flat_RS: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's row of the sum, in float32, by torch."""
    with comm_tag("reduce"):
        return reduce_scatter_rows(flat_RS, group)

"""Sums the gradients of all ranks in low precision: the recipe's place `reduce`.

    reduce_scatter    a buffer (ranks, shard) -> this rank's row of the sum               FSDP
    all_reduce        a list of tensors -> every sum, on all ranks                        DDP

Each tensor has its `WireFormat`. Tensors in narrow formats travel in one all-to-all of bytes for the full
bucket, and are added in the order of a ring (`ring_reduce.py`) under scales that all ranks share
(`shared_scales.py`). fp32 tensors use torch's collectives. The all-reduce of narrow formats is a
reduce-scatter and an all-gather of the sums, in the same format.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from narrowgauge.distributed.comm.ring_reduce import all_gather_chunks, ring_reduce_scatter
from narrowgauge.distributed.comm.shared_scales import (
    WireFormat,
    count_overflow,
    shared_scales,
    to_wire,
    update_prescale,
)
from narrowgauge.formats import Format, decode
from narrowgauge.system.collectives import Group, all_reduce_flat, comm_tag, reduce_scatter_rows

Tensors = Sequence[torch.Tensor]


class QuantizedSum(NamedTuple):
    """A sum in its wire format: uint8 codes and their 0-dim scale, or bf16 or fp16 values and None."""

    numbers: torch.Tensor
    scale: torch.Tensor | None
    element: Format

    def values(self) -> torch.Tensor:
        """The sum in float32."""
        if self.scale is None:
            return self.numbers.float()
        return decode(self.numbers, self.element) * self.scale


def reduce_scatter(
    flat_RS: torch.Tensor, widths: Sequence[int], wires: Sequence[WireFormat], group: Group
) -> torch.Tensor:
    """This rank's shard of the sum over ranks, (S,), float32.

    Args:
        flat_RS: float32 (ranks, S); row r has this rank's terms of rank r's sums, the tensors concatenated.
        widths: elements of each tensor in a row; their sum is S.
        wires: the format of each tensor.
        group: the ranks.
    """
    columns = flat_RS.split(list(widths), 1)
    out = flat_RS.new_empty(flat_RS.shape[1])
    shards = out.split(list(widths))
    wide, narrow = _wide_and_narrow(wires)
    if not narrow:
        return _sum_wide(flat_RS, group)
    if wide:
        wide_shards = _sum_wide(torch.cat([columns[i] for i in wide], 1), group)
        for i, shard in zip(wide, wide_shards.split([widths[i] for i in wide]), strict=True):
            shards[i].copy_(shard)
    sums = sum_quantized([columns[i] for i in narrow], [wires[i] for i in narrow], group)
    for i, total in zip(narrow, sums, strict=True):
        shards[i].copy_(total.values())
    return out


def all_reduce(tensors: Tensors, wires: Sequence[WireFormat], group: Group) -> list[QuantizedSum]:
    """The sum over ranks of each float32 tensor, in its shape and wire format; in fp32 in its place."""
    wide, narrow = _wide_and_narrow(wires)
    all_reduce_flat([tensors[i] for i in wide], group)
    sums = [QuantizedSum(x, None, wire.cast.element) for x, wire in zip(tensors, wires, strict=True)]
    if narrow:
        ranks, flat = group.size(), [tensors[i].reshape(-1) for i in narrow]
        columns = [pad(x, (0, -len(x) % ranks)).view(ranks, -1) for x in flat]
        parts = sum_quantized(columns, [wires[i] for i in narrow], group)
        gathered = all_gather_chunks([part.numbers for part in parts], group)
        for i, part, numbers in zip(narrow, parts, gathered, strict=True):
            sums[i] = part._replace(numbers=numbers[: tensors[i].numel()].view(tensors[i].shape))
    return sums


def sum_quantized(columns_RW: Tensors, wires: Sequence[WireFormat], group: Group) -> list[QuantizedSum]:
    """This rank's row of the sum over ranks of each float32 tensor (ranks, width)."""
    scales = shared_scales(columns_RW, wires, group)
    terms = list(zip(columns_RW, wires, [None if s is None else s[0] for s in scales], strict=True))
    numbers = [to_wire(x, wire, encode) for x, wire, encode in terms]
    elements = dict.fromkeys(wire.cast.element for wire in wires)
    members = [[i for i, wire in enumerate(wires) if wire.cast.element == e] for e in elements]
    by_format = [
        (e, torch.cat([numbers[i] for i in which], 1)) for e, which in zip(elements, members, strict=True)
    ]
    learns = any(wire.prescale is not None for wire in wires)
    totals: dict[int, QuantizedSum] = {}
    within = [torch.zeros((), dtype=torch.int64, device=columns_RW[0].device)] * len(wires)
    for which, (e, _), (sums, overflow) in zip(
        members, by_format, ring_reduce_scatter(by_format, group, learns), strict=True
    ):
        lengths = [columns_RW[i].shape[1] for i in which]
        for i, row in zip(which, sums.split(lengths), strict=True):
            scale = scales[i]
            totals[i] = QuantizedSum(row, None if scale is None else scale[1], e)
        if overflow is not None:
            for i, row in zip(which, overflow.split(lengths), strict=True):
                within[i] = row.sum(dtype=torch.int64)
    if learns:
        before = [count_overflow(*term) for term in terms]
        update_prescale(wires, before, within, [x.numel() for x in columns_RW], group)
    return [totals[i] for i in range(len(wires))]


def _wide_and_narrow(wires: Sequence[WireFormat]) -> tuple[list[int], list[int]]:
    """The indices of the tensors that travel in fp32, and of the others."""
    wide = [i for i, wire in enumerate(wires) if not wire.is_narrow]
    return wide, [i for i, wire in enumerate(wires) if wire.is_narrow]


def _sum_wide(flat_RS: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's row of the sum, in float32, computed by torch."""
    with comm_tag("reduce"):
        return reduce_scatter_rows(flat_RS, group)

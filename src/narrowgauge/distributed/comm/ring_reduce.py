"""Sums values in narrow formats over ranks, in the order in which a ring of devices adds them.

In a ring reduce-scatter every device passes on what it received plus its local term. Of N ranks, rank r ends
up with the sum of chunk r. The chunk starts at its neighbour r + 1 and reaches r last; every stop rounds to
the format F:

    s = x[r+1];   s = F(s + x[r+2]);   ...   s = F(s + x[r+N-1]);   s = F(s + x[r])        all modulo N

F rounds to nearest, ties to even. 8-bit codes saturate at the format's largest value; sums in bf16 and fp16
overflow to infinity, as everywhere in torch, which loss scaling relies on. This is NCCL's ring if the ring
has the ranks in order.

The ring is emulated exactly: one all-to-all brings rank r the chunks r of all ranks, and r performs the
additions in that sequence. (N - 1) / N of the bytes leave each rank, as many as in the ring. The sum is the
same on every backend and network; that of a library that chooses its own ring or tree is not.

The sum of two 8-bit codes is a function of 2^16 pairs, and is therefore a table.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from narrowgauge.formats import Format, codes_of, decode, round_finite
from narrowgauge.formats import format as format_named
from narrowgauge.system.collectives import Group, all_gather_rows, comm_tag


def ring_reduce_scatter(
    by_format: Sequence[tuple[Format, torch.Tensor]], group: Group, counts: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The sums of this rank's chunk, after one all-to-all for all formats.

    Args:
        by_format: each format with its values on the wire, (ranks, chunk): uint8 codes, or bf16 or fp16
            values.
        group: the ranks, which hold chunks of the same length.
        counts: whether to count overflow.

    Returns:
        For each format the two results of `ring_sum`.
    """
    rows = [numbers.contiguous().view(torch.uint8) for _, numbers in by_format]
    sent = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
    received = torch.empty_like(sent)
    with comm_tag("reduce"):
        dist.all_to_all_single(received, sent, group=group)
    chunks = received.split([r.shape[1] for r in rows], 1)
    return [
        ring_sum(_viewed(chunk, numbers.dtype), group.rank(), element, counts)
        for (element, numbers), chunk in zip(by_format, chunks, strict=True)
    ]


def ring_sum(
    terms: torch.Tensor, rank: int, element: Format, counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add the terms of one chunk in ring order.

    Args:
        terms: (ranks, chunk), the values of every rank in the format `element`.
        rank: rank of this process, which gets the sum.
        element: the format.
        counts: whether to count overflow.

    Returns:
        The sum, (chunk,), in the same format; and how many of its additions saturated, (chunk,) of uint8, or
        None.
    """
    # Without values (meta device) two additions stand for all.
    ranks = min(terms.shape[0], 3) if terms.is_meta else terms.shape[0]
    total = terms[(rank + 1) % ranks]
    if terms.dtype != torch.uint8:
        for k in range(2, ranks + 1):
            total = total + terms[(rank + k) % ranks]
        return total, None
    sums, saturates = _tables(element.name, terms.device)
    overflow = torch.zeros_like(total) if counts else None
    for k in range(2, ranks + 1):
        pair = (total.int() << 8) | terms[(rank + k) % ranks]
        total = sums.index_select(0, pair)
        if overflow is not None:
            overflow += saturates.index_select(0, pair)
    return total, overflow


def all_gather_chunks(chunks: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The chunks (chunk,) of all ranks, concatenated for each tensor, after one all-gather."""
    rows = [chunk.contiguous().view(torch.uint8) for chunk in chunks]
    with comm_tag("reduce"):
        gathered = all_gather_rows(torch.cat(rows), group)
    columns = gathered.split([len(row) for row in rows], 1)
    return [_viewed(column, c.dtype).flatten() for column, c in zip(columns, chunks, strict=True)]


def _viewed(some_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes viewed as `dtype`, copied to new memory: a slice of bytes may not be aligned."""
    if dtype == torch.uint8:
        return some_bytes
    return some_bytes.clone(memory_format=torch.contiguous_format).view(dtype)


@cache
def _tables(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For an 8-bit format, at 256 a + b: the code of the rounded sum, and 1 where it saturated."""
    element = format_named(name)
    values = decode(torch.arange(256, dtype=torch.uint8), element)
    exact = (values[:, None] + values).flatten()
    rounded = round_finite(exact, element)
    rounded[exact.isnan()] = torch.nan
    saturates = (exact.abs() > element.max).to(torch.uint8)
    return codes_of(rounded, element).to(device), saturates.to(device)

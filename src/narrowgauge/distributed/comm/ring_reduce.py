"""The sum of narrow numbers over processes, as a ring of devices adds them up.

In a ring reduce-scatter every device passes on what it was given plus its own. Of N ranks, rank r is to hold
the sum of chunk r. The chunk starts at its neighbour r + 1 and comes to r last; with numbers of a format F,
every stop rounds:

    s = x[r+1];   s = F(s + x[r+2]);   ...   s = F(s + x[r+N-1]);   s = F(s + x[r])        all modulo N

F rounds to the nearest, ties to even. Codes of a byte saturate at the format's largest number; sums in bf16
and fp16 overflow to infinity, as everywhere in torch, which is what loss scaling waits for. This is NCCL's
ring when ranks lie in it in their order.

Here it is emulated exactly: one all-to-all brings rank r the chunks r of all ranks, and r does the additions
in that sequence. (N - 1) / N of the bytes leave each rank, as many as in the ring, and the sum is the same
on every backend and network, which that of a library that chooses its own ring or tree is not.

The sum of two codes of a byte is a function of 2^16 pairs, and so a table.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from narrowgauge.collectives import Group, all_gather_rows
from narrowgauge.formats import Format, decode, encode, round_finite
from narrowgauge.formats import format as format_named
from narrowgauge.quantization.purpose import comm_tag


def ring_reduce_scatter(
    kinds: Sequence[tuple[Format, torch.Tensor]], group: Group, counts: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The sums of this rank's chunk, after one all-to-all for all kinds.

    Args:
        kinds: of each format its numbers on the wire, (ranks, chunk): uint8 codes, or bf16 or fp16 values.
        group: the ranks, which hold chunks of the same length.
        counts: whether to count overflow.

    Returns:
        For each kind the sums, (chunk,), in the same numbers; and how many sums of a byte were cut to the
        largest number, (chunk,) of uint8, or None.
    """
    rows = [numbers.contiguous().view(torch.uint8) for _, numbers in kinds]
    mine = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
    theirs = torch.empty_like(mine)
    with comm_tag("reduce"):
        dist.all_to_all_single(theirs, mine, group=group)
    found = []
    for (element, numbers), parts in zip(kinds, theirs.split([r.shape[1] for r in rows], 1), strict=True):
        found.append(ring_sum(_viewed(parts, numbers.dtype), group.rank(), element, counts))
    return found


def ring_sum(
    parts: torch.Tensor, rank: int, element: Format, counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The additions of one chunk, of which `parts` (ranks, chunk) has every rank's numbers."""
    ranks = (
        min(parts.shape[0], 3) if parts.is_meta else parts.shape[0]
    )  # without numbers one sum stands for all
    total = parts[(rank + 1) % ranks]
    if parts.dtype != torch.uint8:
        for k in range(2, ranks + 1):
            total = total + parts[(rank + k) % ranks]
        return total, None
    sums, cut = _tables(element.name, parts.device)
    overflow = torch.zeros_like(total) if counts else None
    for k in range(2, ranks + 1):
        pair = (total.int() << 8) | parts[(rank + k) % ranks]
        total = sums.index_select(0, pair)
        if overflow is not None:
            overflow += cut.index_select(0, pair)
    return total, overflow


def gather_chunks(chunks: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Of each tensor (chunk,) those of all ranks, one after the other, after one all-gather."""
    rows = [chunk.contiguous().view(torch.uint8) for chunk in chunks]
    mine = torch.cat(rows)
    with comm_tag("reduce"):
        every = all_gather_rows(mine, group)
    parts = every.split([len(row) for row in rows], 1)
    return [_viewed(p, c.dtype).flatten() for p, c in zip(parts, chunks, strict=True)]


def _viewed(some_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers: in memory of their own, since where they lie may be no place for such numbers."""
    if dtype == torch.uint8:
        return some_bytes
    return some_bytes.clone(memory_format=torch.contiguous_format).view(dtype)


@cache
def _tables(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a format of 8 bits, by 256 a + b: the code of the rounded sum, and 1 where it was cut."""
    element = format_named(name)
    values = decode(torch.arange(256, dtype=torch.uint8), element)
    exact = (values[:, None] + values).flatten()
    rounded = round_finite(exact, element)
    rounded[exact.isnan()] = torch.nan
    cut = (exact.abs() > element.max).to(torch.uint8)
    return encode(rounded, element).to(device), cut.to(device)

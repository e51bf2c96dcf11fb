"""Sums the gradients of all ranks in low precision: the recipe's place `reduce`.

    reduce_scatter                a buffer (ranks, shard) -> this rank's row of the sum    FSDP (`fsdp`)
    all_reduce                    a list of tensors -> every sum, on all ranks
    quantized_comm_hook           for `DistributedDataParallel.register_comm_hook`
    all_reduce_gradient_states    for gradients in low precision, outside autograd (`nn.weight`)

The result is a sum; it is divided only if torch asks for a mean (FSDP's default) or the caller divides. Each
tensor has its `WireFormat`; fp32 tensors use torch's collectives. The all-reduce of narrow formats is a
reduce-scatter and an all-gather of the sums, in the same format.

**Scales that all ranks share** (FP8-LM, arXiv 2310.18313, eq. 4 to 6). Every rank has its local gradient of a
weight. If each were scaled by its local amax, codes could not be added without rounding them again. So all
ranks scale by the largest magnitude on any rank, which one all-reduce with MAX finds for all weights of a
bucket:

    scale = fp32_scale(MAX over ranks of amax) * mu

A NaN or an infinity anywhere counts as infinite (MAX of a NaN is not the same on all backends), and makes the
whole sum NaN on all ranks. mu is the factor of automatic pre-scaling (`quantization.state.gradient_state`),
if the cast uses it. The number of elements that overflow, before the sum or in it, is summed over the ranks
as integers, so that mu stays bit-identical on all of them. If a weight is also sharded or replicated along
other mesh axes, the scale is the same for all of it.

**The order of a ring.** In a ring reduce-scatter every device passes on what it received plus its local term.
Of N ranks, rank r ends up with the sum of chunk r. The chunk starts at its neighbour r + 1 and reaches r
last; every stop rounds to the format F:

    s = x[r+1];   s = F(s + x[r+2]);   ...   s = F(s + x[r+N-1]);   s = F(s + x[r])        all modulo N

F rounds to nearest, ties to even. 8-bit codes saturate at the format's largest value; sums in bf16 and fp16
overflow to infinity, as everywhere in torch, which loss scaling relies on. This is NCCL's ring if the ring
has the ranks in order.

The ring is emulated exactly: one all-to-all of bytes, for the full bucket, brings rank r the chunks r of all
ranks, and r performs the additions in that sequence. (N - 1) / N of the bytes leave each rank, as many as in
the ring. The sum is the same on every backend and network; that of a library that chooses its own ring or
tree is not. The sum of two 8-bit codes is a function of 2^16 pairs, and is therefore a table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from narrowgauge.formats import (
    Format,
    codes_of,
    decode,
    encode_finite_,
    round_finite,
    round_finite_,
    torch_dtype,
)
from narrowgauge.formats import format as format_named
from narrowgauge.kernels.cast import amaxes_of
from narrowgauge.nn.linear import Linear
from narrowgauge.quantization import Cast, GradientState, PreScale, make_cast, state_of
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.system.collectives import (
    Group,
    all_gather_rows,
    all_reduce_flat,
    all_reduce_max,
    all_reduce_max_,
    comm_tag,
    reduce_scatter_rows,
)
from narrowgauge.system.torch_compat import unobserved

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class WireFormat:
    """The wire format of one tensor."""

    cast: Cast  # the cast of its values
    prescale: PreScale | None = None  # the adaptive factor of its scale, if the cast uses one
    # groups that hold other shards or replicas of the same weight, and share its scale and factor
    also: tuple[Group, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether the format is other than float32."""
        return self.cast.name != "fp32"


WIDE = WireFormat(make_cast("fp32"))
WireFormats = Mapping[torch.Tensor, WireFormat]


class QuantizedSum(NamedTuple):
    """A sum in its wire format: uint8 codes and their 0-dim scale, or bf16 or fp16 values and None."""

    elements: torch.Tensor
    scale: torch.Tensor | None
    element: Format

    def values(self) -> torch.Tensor:
        """The sum in float32."""
        if self.scale is None:
            return self.elements.float()
        return decode(self.elements, self.element) * self.scale


def wire_formats(model: torch.nn.Module) -> dict[torch.Tensor, WireFormat]:
    """The wire format of each parameter's gradient: the recipe's for weights of linear layers, else fp32.

    Sharding replaces parameters, so call this again afterwards.
    """
    wires: dict[torch.Tensor, WireFormat] = dict.fromkeys(model.parameters(), WIDE)
    for layer in model.modules():
        if isinstance(layer, Linear):
            wires[layer.weight] = WireFormat(
                layer.recipe["reduce"], layer.reduce_prescale, _holders(layer.weight)
            )
    return wires


def _holders(weight: torch.Tensor) -> tuple[Group, ...]:
    """The groups that hold shards or replicas of a weight."""
    shard = state_of(weight).shard
    groups = [] if shard is None else shard.groups
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        replicated = (dim for dim, placement in enumerate(weight.placements) if placement.is_replicate())
        groups = [*groups, *(mesh.get_group(dim) for dim in replicated)]
    return tuple(groups)


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
    if wide:
        with comm_tag("reduce"):
            sums = reduce_scatter_rows(torch.cat([columns[i] for i in wide], 1), group)
        for i, shard in zip(wide, sums.split([widths[i] for i in wide]), strict=True):
            shards[i].copy_(shard)
    totals = sum_quantized([columns[i] for i in narrow], [wires[i] for i in narrow], group)
    for i, total in zip(narrow, totals, strict=True):
        shards[i].copy_(total.values())
    return out


def all_reduce(tensors: Tensors, wires: Sequence[WireFormat], group: Group) -> list[QuantizedSum]:
    """The sum over ranks of each float32 tensor, in its shape and wire format; in fp32 in its place."""
    wide, narrow = _wide_and_narrow(wires)
    all_reduce_flat([tensors[i] for i in wide], group)
    sums = [QuantizedSum(x, None, wire.cast.element) for x, wire in zip(tensors, wires, strict=True)]
    flat = [tensors[i].reshape(-1) for i in narrow]
    columns = [pad(x, (0, -len(x) % group.size())).view(group.size(), -1) for x in flat]
    parts = sum_quantized(columns, [wires[i] for i in narrow], group)
    if not narrow:
        return sums
    gathered = _in_bytes([part.elements for part in parts], partial(all_gather_rows, group=group))
    for i, part, elements in zip(narrow, parts, gathered, strict=True):
        sums[i] = part._replace(elements=elements.flatten()[: tensors[i].numel()].view(tensors[i].shape))
    return sums


def quantized_comm_hook(
    wires: WireFormats, group: Group
) -> Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]:
    """A communication hook for DDP: the sums of a bucket's gradients.

    Each parameter has one scale, shared by all ranks; one collective computes the scales of a bucket.
    """

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        terms, formats = bucket.gradients(), [wires.get(p, WIDE) for p in bucket.parameters()]
        for term, total in zip(terms, all_reduce(terms, formats, group), strict=True):
            term.copy_(total.values())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook


def all_reduce_gradient_states(
    gradients: Sequence[GradientState], wires: Sequence[WireFormat], group: Group
) -> None:
    """Replace gradients at rest by their sums over ranks; one that is empty on a rank counts as zeros.

    If a gradient rests and travels in the same format, the codes of the sum become its codes.
    """
    sums = all_reduce([_values(gradient) for gradient in gradients], wires, group)
    for gradient, total in zip(gradients, sums, strict=True):
        _store(gradient, total)
        gradient.is_empty, gradient.wide = False, None  # equal on all ranks, whichever read its own before
    # With the same overflow rates all ranks choose the same pre-scaling factors.
    all_reduce_max_([g.prescale.tensors["overflowed"] for g in gradients if g.prescale is not None], group)


def _values(gradient: GradientState) -> torch.Tensor:
    if gradient.is_empty:
        return torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
    return gradient.read().clone()


def _store(gradient: GradientState, total: QuantizedSum) -> None:
    """Store a sum in a gradient at rest."""
    cast = gradient.cast
    same = cast.element == total.element and cast.block is None and not cast.codebook
    if not (same and cast.is_scaled == (total.scale is not None)):
        gradient.write(total.values())
    elif total.scale is None:
        gradient.tensors["values"].copy_(total.elements)
    else:
        gradient.tensors["codes"].copy_(total.elements)
        gradient.tensors["scales"].copy_(total.scale)


def sum_quantized(columns_RW: Tensors, wires: Sequence[WireFormat], group: Group) -> list[QuantizedSum]:
    """This rank's row of the sum over ranks of each float32 tensor (ranks, width)."""
    if not wires:
        return []
    scales = shared_scales(columns_RW, wires, group)
    terms = [(x, wire, encode) for x, wire, (encode, _) in zip(columns_RW, wires, scales, strict=True)]
    members: dict[Format, list[int]] = {}
    for i, wire in enumerate(wires):
        members.setdefault(wire.cast.element, []).append(i)
    sent = [torch.cat([to_wire(*terms[i]) for i in which], 1) for which in members.values()]
    learns = any(wire.prescale is not None for wire in wires)
    totals: dict[int, QuantizedSum] = {}
    within = [torch.zeros((), dtype=torch.int64, device=sent[0].device)] * len(wires)
    for (element, which), chunks in zip(members.items(), _all_to_all(sent, group), strict=True):
        total, overflow = ring_sum(chunks, group.rank(), element, learns)
        lengths = [columns_RW[i].shape[1] for i in which]
        for i, row in zip(which, total.split(lengths), strict=True):
            totals[i] = QuantizedSum(row, scales[i][1], element)
        if overflow is not None:
            for i, row in zip(which, overflow.split(lengths), strict=True):
                within[i] = row.sum(dtype=torch.int64)
    if learns:
        counts = torch.stack([*(count_overflow(*term) for term in terms), *within])
        update_prescale(wires, counts, [x.numel() for x in columns_RW], group)
    return [totals[i] for i in range(len(wires))]


def _wide_and_narrow(wires: Sequence[WireFormat]) -> tuple[list[int], list[int]]:
    """The indices of the tensors that travel in fp32, and of the others."""
    wide = [i for i, wire in enumerate(wires) if not wire.is_narrow]
    return wide, [i for i, wire in enumerate(wires) if wire.is_narrow]


def shared_scales(
    tensors: Tensors, wires: Sequence[WireFormat], group: Group
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The scales of float32 tensors that are added over ranks.

    Returns:
        For each tensor (encode, decode), 0-dim float32, the same on all ranks; None if the cast has no scale.
        Decode is NaN if the tensor is not finite on some rank.
    """
    scaled = [i for i, wire in enumerate(wires) if wire.cast.is_scaled]
    scales: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * len(wires)
    if not scaled:
        return scales
    amaxes = all_reduce_max(amaxes_of([tensors[i] for i in scaled]), [group])
    for further, which in _further_groups([wires[i] for i in scaled], group):
        amaxes[which] = all_reduce_max(amaxes[which], [further])
    for i, amax in zip(scaled, amaxes, strict=True):
        cast, prescale = wires[i].cast, wires[i].prescale
        finite = amax.isfinite()
        if prescale is None:
            encode, _ = fp32_scale(torch.where(finite, amax, 0.0), cast.element, cast.power_of_two)
        else:
            prescale.begin(group.size())
            encode = prescale.scale_for(amax, cast)
        scales[i] = encode, torch.where(finite, 1.0 / encode, torch.nan)
    return scales


def to_wire(x: torch.Tensor, wire: WireFormat, encode: torch.Tensor | None) -> torch.Tensor:
    """A float32 tensor in its wire format: uint8 codes, or values in bf16 or fp16."""
    if encode is None:
        return x.to(torch_dtype(wire.cast.element))
    return encode_finite_(round_finite_(x * encode, wire.cast.element), wire.cast.element)


def count_overflow(x: torch.Tensor, wire: WireFormat, encode: torch.Tensor | None) -> torch.Tensor:
    """The number of elements beyond the format's largest value, 0-dim int64; 0 without an adaptive factor."""
    if wire.prescale is None or encode is None:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    return torch.count_nonzero(x.abs() * encode > wire.cast.element.max)


def update_prescale(
    wires: Sequence[WireFormat], counts: torch.Tensor, elements: Sequence[int], group: Group
) -> None:
    """Update the pre-scale factors from the overflow rates of local gradients (averaged over ranks) and of
    their sums.

    `counts`, int64: how many elements of each local tensor overflowed, then how many of the sums that this
    rank computed. `elements`: the number of elements of each global tensor.
    """
    with comm_tag("amax"):
        dist.all_reduce(counts, group=group)
        totals = torch.cat([counts, torch.tensor(elements, device=counts.device)]).view(3, -1)
        for further, which in _further_groups(wires, group):
            shared = totals[:, which]
            dist.all_reduce(shared, group=further)
            totals[:, which] = shared
    for wire, terms, sums, n in zip(wires, *totals, strict=True):
        if wire.prescale is not None:
            wire.prescale.record_overflow(((terms / group.size() + sums) / n.clamp(min=1)).float())


def _further_groups(wires: Sequence[WireFormat], group: Group) -> list[tuple[Group, list[int]]]:
    """Each group of `also` with other ranks than `group`, and the indices of its tensors."""
    ranks = dist.get_process_group_ranks(group)
    further: dict[Group, list[int]] = {}
    for i, wire in enumerate(wires):
        for other in wire.also:
            if wire.cast.is_scaled and dist.get_process_group_ranks(other) != ranks:
                further.setdefault(other, []).append(i)
    return list(further.items())


def ring_sum(
    terms: torch.Tensor, rank: int, element: Format, counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add the terms of one chunk in ring order.

    Args:
        terms: (ranks, chunk), the values of every rank in the format `element`: uint8 codes, or bf16 or fp16.
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


@cache
def _tables(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For an 8-bit format, at 256 a + b: the code of the rounded sum, and 1 where it saturated."""
    element = format_named(name)
    with unobserved():  # they outlive a step, and no account of a step's memory contains them
        values = decode(torch.arange(256, dtype=torch.uint8), element)
        exact = (values[:, None] + values).flatten()
        rounded = torch.where(exact.isnan(), torch.nan, round_finite(exact, element))
        return codes_of(rounded, element).to(device), (exact.abs() > element.max).to(device, torch.uint8)


def _all_to_all(tensors: Tensors, group: Group) -> list[torch.Tensor]:
    """Row r of each tensor (ranks, n) to rank r, in one collective: this rank's rows of all ranks."""

    def exchange(sent: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    return _in_bytes(tensors, exchange)


def _in_bytes(tensors: Tensors, collective: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """One collective on the bytes of all tensors along their last dimension, to (ranks, n) of each dtype."""
    rows = [x.contiguous().view(torch.uint8) for x in tensors]
    with comm_tag("reduce"):
        received = collective(torch.cat(rows, -1) if len(rows) > 1 else rows[0])
    found = []
    for x, column in zip(tensors, received.split([row.shape[-1] for row in rows], 1), strict=True):
        is_bytes = x.dtype == torch.uint8  # all others need aligned memory
        found.append(
            column if is_bytes else column.clone(memory_format=torch.contiguous_format).view(x.dtype)
        )
    return found

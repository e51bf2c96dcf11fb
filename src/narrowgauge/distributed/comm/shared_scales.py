"""Scales that all ranks share, so that their codes can be added (FP8-LM, arXiv 2310.18313, eq. 4 to 6).

Every rank has its local gradient of a weight. If each were scaled by its local amax, codes could not be added
without rounding them again. So all ranks scale by the largest magnitude on any rank, which one all-reduce
with MAX finds for all weights of a bucket:

    scale = fp32_scale(MAX over ranks of amax) * mu

A NaN or an infinity anywhere counts as infinite (MAX of a NaN is not the same on all backends), and makes the
whole sum NaN on all ranks. mu is the factor of automatic pre-scaling (`quantization.state.gradient_state`),
if the cast uses it. The number of elements that overflow, before the sum or in it, is summed over the ranks
as integers, so that mu stays bit-identical on all of them.

If a weight is also sharded or replicated along other mesh axes, the scale is the same for all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowgauge.formats import encode_finite_, round_finite_, torch_dtype
from narrowgauge.kernels.cast import amaxes_of
from narrowgauge.quantization import Cast, PreScale
from narrowgauge.quantization.scales import FLOAT_MAX, fp32_scale
from narrowgauge.quantization.state.gradient_state import applied
from narrowgauge.system.collectives import Group, all_reduce_max, comm_tag


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


def shared_scales(
    tensors: Sequence[torch.Tensor], wires: Sequence[WireFormat], group: Group
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """The scales of float32 tensors that are added over ranks.

    Returns:
        For each tensor (encode, decode), 0-dim float32, the same on all ranks; None if the cast has no scale.
        Decode is NaN if the tensor is not finite on some rank.
    """
    scaled = [i for i, wire in enumerate(wires) if wire.cast.is_scaled]
    scales: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(wires)
    if not scaled:
        return scales
    amaxes = all_reduce_max(amaxes_of([tensors[i] for i in scaled]), [group])
    for further, which in _further_groups([wires[i] for i in scaled], group):
        amaxes[which] = all_reduce_max(amaxes[which], [further])
    for i, amax in zip(scaled, amaxes, strict=True):
        cast, prescale = wires[i].cast, wires[i].prescale
        finite = amax.isfinite()
        encode, _ = fp32_scale(torch.where(finite, amax, 0.0), cast.element, cast.power_of_two)
        if prescale is not None:
            prescale.begin(group.size())
            encode = (encode * applied(prescale.tensors["mu"])).clamp(max=FLOAT_MAX)
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
    wires: Sequence[WireFormat],
    before: Sequence[torch.Tensor],
    within: Sequence[torch.Tensor],
    elements: Sequence[int],
    group: Group,
) -> None:
    """Update the pre-scale factors from the overflow rates of local gradients (averaged over ranks) and of
    their sums.

    Args:
        wires: the format of each tensor.
        before: number of elements of each local tensor that overflowed, 0-dim int64.
        within: number of sums computed by this rank that overflowed, 0-dim int64.
        elements: number of elements of each global tensor.
        group: the ranks.
    """
    counts = torch.stack([*before, *within])
    with comm_tag("amax"):
        dist.all_reduce(counts, group=group)
        totals = torch.cat([counts, torch.tensor(elements, device=counts.device)]).view(3, -1)
        for further, which in _further_groups(wires, group):
            shared = totals[:, which]
            dist.all_reduce(shared, group=further)
            totals[:, which] = shared
    for wire, terms, sums, n in zip(wires, *totals, strict=True):
        if wire.prescale is not None:
            share = ((terms / group.size() + sums) / n.clamp(min=1)).float()
            overflowed = wire.prescale.tensors["overflowed"]
            overflowed.copy_(torch.maximum(overflowed, share))


def _further_groups(wires: Sequence[WireFormat], group: Group) -> list[tuple[Group, list[int]]]:
    """Each group of `also` with other ranks than `group`, and the indices of its tensors."""
    ranks = dist.get_process_group_ranks(group)
    further: dict[Group, list[int]] = {}
    for i, wire in enumerate(wires):
        for other in wire.also:
            if wire.cast.is_scaled and dist.get_process_group_ranks(other) != ranks:
                further.setdefault(other, []).append(i)
    return list(further.items())

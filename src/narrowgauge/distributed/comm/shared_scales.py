"""Scales that all ranks share, so that codes of theirs can be added (FP8-LM, arXiv 2310.18313, eq. 4 to 6).

Every rank has its own gradient of a weight. Scaled each by its own largest magnitude they could not be added
without being rounded anew, so all take the largest magnitude that any rank has, for all weights of a bucket
in one all-reduce with MAX:

    scale = fp32_scale(MAX over ranks of amax) * mu

A NaN or an infinity anywhere counts as infinite (MAX of a NaN is not the same on all backends), and makes
the whole sum NaN on all ranks. mu is the factor of automatic pre-scaling (`quantization.prescale`), where
the cast asks for it; how many elements did not fit, before or in the sum, is added up over the ranks as
integers, so that mu stays the same on all of them, to the bit.

Where a weight is divided in other directions, too, or has copies there, the scale is the same for all of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowgauge.collectives import Group
from narrowgauge.formats import encode_finite_, round_finite_, torch_dtype
from narrowgauge.quantization import Cast, PreScale
from narrowgauge.quantization.purpose import comm_tag
from narrowgauge.quantization.scales import FLOAT_MAX, fp32_scale
from narrowgauge.quantization.sharding.shard import all_reduce_amax
from narrowgauge.quantization.state.prescale import applied


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How one tensor travels.

    Attributes:
        cast: its numbers.
        prescale: the factor that its scale learns, where the cast asks for it.
        also: groups that hold other pieces of the same weight, or copies, and share its scale and factor.
    """

    cast: Cast
    prescale: PreScale | None = None
    also: tuple[Group, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether it is not simply float32."""
        return self.cast.name != "fp32"


def all_reduce_max_amax(tensors: Iterable[torch.Tensor], group: Group) -> torch.Tensor:
    """The largest magnitude of each tensor on any rank, float32, infinite where any element is not finite."""
    amax = [t.abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]
    together = torch.stack(amax).float()
    return all_reduce_amax(together, [group])


def shared_scales(
    tensors: Sequence[torch.Tensor], wires: Sequence[WireFormat], group: Group
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """For each tensor (encode, decode), 0-dim float32, the same on all ranks; None where the cast has none.

    Decode is NaN where the tensor is not finite on some rank.
    """
    scaled = [i for i, wire in enumerate(wires) if wire.cast.is_scaled]
    found: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(wires)
    if not scaled:
        return found
    every = all_reduce_max_amax([tensors[i] for i in scaled], group)
    for other, which in _others([wires[i] for i in scaled], group):
        every[which] = all_reduce_amax(every[which], [other])
    for i, amax in zip(scaled, every, strict=True):
        cast, prescale = wires[i].cast, wires[i].prescale
        finite = amax.isfinite()
        encode, _ = fp32_scale(torch.where(finite, amax, 0.0), cast.element, cast.power_of_two)
        if prescale is not None:
            prescale.begin(group.size())
            encode = (encode * applied(prescale.tensors["mu"])).clamp(max=FLOAT_MAX)
        found[i] = encode, torch.where(finite, 1.0 / encode, torch.nan)
    return found


def to_wire(x: torch.Tensor, wire: WireFormat, encode: torch.Tensor | None) -> torch.Tensor:
    """A float32 tensor as it travels: uint8 codes, or values in bf16 or fp16."""
    if encode is None:
        return x.to(torch_dtype(wire.cast.element))
    return encode_finite_(round_finite_(x * encode, wire.cast.element), wire.cast.element)


def count_cut(x: torch.Tensor, wire: WireFormat, encode: torch.Tensor | None) -> torch.Tensor:
    """How many elements do not fit, 0-dim int64; zero where nobody asks."""
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
    """Tell the factors which share of the elements did not fit: of a rank's own on average, and of all sums.

    Args:
        wires: of the tensors.
        before: elements of this rank's own tensors that were cut, 0-dim int64.
        within: sums that this rank computed and that were cut.
        elements: of each whole tensor.
        group: the ranks.
    """
    counts = torch.stack([*before, *within])
    with comm_tag("amax"):
        dist.all_reduce(counts, group=group)
        totals = torch.cat([counts, torch.tensor(elements, device=counts.device)]).view(3, -1)
        for other, which in _others(wires, group):
            of_these = totals[:, which]
            dist.all_reduce(of_these, group=other)
            totals[:, which] = of_these
    for wire, own, sums, n in zip(wires, *totals, strict=True):
        if wire.prescale is not None:
            share = ((own / group.size() + sums) / n.clamp(min=1)).float()
            overflowed = wire.prescale.tensors["overflowed"]
            overflowed.copy_(torch.maximum(overflowed, share))


def _others(wires: Sequence[WireFormat], group: Group) -> list[tuple[Group, list[int]]]:
    """Each further group, and which of the tensors share their scale with it."""
    here = dist.get_process_group_ranks(group)
    found: dict[Group, list[int]] = {}
    for i, wire in enumerate(wires):
        for other in wire.also:
            if wire.cast.is_scaled and dist.get_process_group_ranks(other) != here:
                found.setdefault(other, []).append(i)
    return list(found.items())

"""Where gradients are added up over ranks: `narrow_reduce.py` as FSDP, DDP and state at rest want it.

    NarrowReduceScatter     for `FSDPModule.set_custom_reduce_scatter`, one for each sharded module
    narrow_hook             for `DistributedDataParallel.register_comm_hook`
    all_reduce_at_rest      for gradients that lie in narrow numbers, outside of autograd (`nn.weight_state`)

Sums are sums; a mean is one where torch asks for it (FSDP's default) or the caller divides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from narrowgauge.collectives import Group, all_reduce_max_
from narrowgauge.distributed.comm.quantized_reduce import (
    QuantizedSum,
    all_reduce,
    all_reduce_quantized,
    reduce_scatter,
)
from narrowgauge.distributed.comm.shared_scales import WireFormat
from narrowgauge.errors import UserError
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.weight_state import GradientState
from narrowgauge.quantization import TensorShard, make_cast

WIDE = WireFormat(make_cast("fp32"))
WireFormats = Mapping[torch.Tensor, WireFormat]


def wire_formats(model: torch.nn.Module) -> dict[torch.Tensor, WireFormat]:
    """How the gradient of each parameter travels: that of a linear layer's weight as the recipe says.

    Others travel in fp32. The parameters are the present ones: sharding puts new ones in their place.
    """
    wires: dict[torch.Tensor, WireFormat] = dict.fromkeys(model.parameters(), WIDE)
    for layer in model.modules():
        if isinstance(layer, Linear):
            wires[layer.weight] = WireFormat(
                layer.recipe.reduce, layer.reduce_prescale, _holders(layer.weight)
            )
    return wires


def _holders(weight: torch.Tensor) -> tuple[Group, ...]:
    """The groups that hold pieces or copies of a weight."""
    part: TensorShard | None = getattr(weight, "part", None)
    groups = [] if part is None else part.groups
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        copies = (dim for dim, placement in enumerate(weight.placements) if placement.is_replicate())
        groups = [*groups, *(mesh.get_group(dim) for dim in copies)]
    return tuple(groups)


def quantize_fsdp_reduce(model: torch.nn.Module) -> None:
    """Make every sharded module of a model reduce its gradients as its layers' recipes say."""
    wires = wire_formats(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own = _own_parameters(module)
            if any(wires[p].is_narrow for p in own):
                comm: Any = QuantizedReduceScatter(own, wires)  # of FSDP's interface, which is not public
                module.set_custom_reduce_scatter(comm)


class QuantizedReduceScatter:
    """FSDP's reduce-scatter of one sharded module, each of its parameters in the numbers of its wire.

    FSDP hands over a flat float32 buffer (ranks, shard): row r holds of every parameter what rank r keeps,
    one after the other, the first dimension of each parameter padded to a multiple of the ranks.
    """

    def __init__(self, parameters: Sequence[DTensor], wires: WireFormats) -> None:
        """Of the parameters that one FSDP module shards, in its order."""
        self.wires = [wires[p] for p in parameters if p.requires_grad]
        self.shapes = [p.shape for p in parameters if p.requires_grad]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` (ranks * shard) to `output_tensor` (shard)."""
        ranks = group.size()
        widths = [-(-shape[0] // ranks) * shape[1:].numel() for shape in self.shapes]
        if ranks * sum(widths) != input_tensor.numel():
            raise UserError(
                f"gradients of {input_tensor.numel()} elements came to a reduction of {ranks * sum(widths)}: "
                "some parameter of the module took no part in the loss; freeze it (requires_grad = False), "
                "or set --recipe.reduce fp32"
            )
        assert not async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        found = reduce_scatter(input_tensor.view(ranks, -1).float(), widths, self.wires, group)
        output_tensor.copy_(found / ranks if op == dist.ReduceOp.AVG else found)


def quantized_comm_hook(
    wires: WireFormats, group: Group, divisor: float = 1.0
) -> Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]:
    """A communication hook of DDP: the sums of a bucket's gradients, divided by `divisor`.

    Every parameter's scale is its own, shared by all ranks; those of a bucket are agreed on at once.
    """

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        own = [wires.get(p, WIDE) for p in bucket.parameters()]
        all_reduce(bucket.gradients(), own, group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(divisor))
        return done

    return hook


def all_reduce_gradient_states(
    gradients: Sequence[GradientState], wires: Sequence[WireFormat], group: Group
) -> None:
    """Put the sum over ranks in place of gradients at rest; those that are empty here count as zeros.

    Where a gradient lies in the numbers that it travels in, the codes of the sum become its codes as they
    are.
    """
    everything = [_numbers(g) for g in gradients]
    narrow = [i for i, wire in enumerate(wires) if wire.is_narrow]
    wide = [i for i, wire in enumerate(wires) if not wire.is_narrow]
    all_reduce([everything[i] for i in wide], [wires[i] for i in wide], group)
    for i in wide:
        gradients[i].write(everything[i])
    sums = all_reduce_quantized([everything[i] for i in narrow], [wires[i] for i in narrow], group)
    for i, total in zip(narrow, sums, strict=True):
        _store(gradients[i], total)
    for gradient in gradients:
        gradient.is_empty = False
    # What is learnt of them is then the same on all ranks.
    all_reduce_max_([g.prescale.tensors["overflowed"] for g in gradients if g.prescale is not None], group)


def _numbers(gradient: GradientState) -> torch.Tensor:
    if gradient.is_empty:
        return torch.zeros(gradient.shape, device=gradient.device)
    return gradient.read().clone()


def _store(gradient: GradientState, total: QuantizedSum) -> None:
    """A sum off the wire into a gradient at rest."""
    cast = gradient.cast
    same = cast.element == total.element and cast.block is None and not cast.codebook
    if not (same and cast.is_scaled == (total.scale is not None)):
        gradient.write(total.values())
    elif total.scale is None:
        gradient.tensors["values"].copy_(total.numbers)
    else:
        gradient.tensors["codes"].copy_(total.numbers)
        gradient.tensors["scales"].copy_(total.scale)


def _own_parameters(module: torch.nn.Module) -> list[DTensor]:
    """The parameters that one FSDP module shards, in its order: children first, no FSDP modules within."""
    found: dict[DTensor, None] = {}

    def walk(part: torch.nn.Module) -> None:
        for child in part.children():
            if not isinstance(child, FSDPModule):
                walk(child)
        for p in part.parameters(recurse=False):
            if isinstance(p, DTensor):
                found[p] = None

    walk(module)
    return list(found)

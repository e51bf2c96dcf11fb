"""Connects `quantized_reduce.py` to FSDP, to DDP and to gradients at rest, which sum gradients over ranks.

    QuantizedReduceScatter        for `FSDPModule.set_custom_reduce_scatter`, one for each sharded module
    quantized_comm_hook           for `DistributedDataParallel.register_comm_hook`
    all_reduce_gradient_states    for gradients in low precision, outside autograd (`nn.weight`)

The result is a sum; it is divided only if torch asks for a mean (FSDP's default) or the caller divides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.comm.quantized_reduce import QuantizedSum, all_reduce, reduce_scatter
from narrowgauge.distributed.comm.shared_scales import WireFormat
from narrowgauge.nn.linear import Linear
from narrowgauge.quantization import GradientState, make_cast, state_of
from narrowgauge.system.collectives import Group, all_reduce_max_
from narrowgauge.system.errors import UserError

WIDE = WireFormat(make_cast("fp32"))
WireFormats = Mapping[torch.Tensor, WireFormat]


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


def quantize_fsdp_reduce(model: torch.nn.Module) -> None:
    """Make every sharded module of a model reduce its gradients in the formats of its layers' recipes."""
    wires = wire_formats(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            parameters = _unit_parameters(module)
            if any(wires[p].is_narrow for p in parameters):
                comm: Any = QuantizedReduceScatter(parameters, wires)  # the type in torch is not public
                module.set_custom_reduce_scatter(comm)


class QuantizedReduceScatter:
    """FSDP's reduce-scatter for one sharded module, with each parameter in its wire format.

    FSDP passes a flat float32 buffer (ranks, shard). Row r concatenates rank r's shards of all parameters;
    the first dimension of each parameter is padded to a multiple of the number of ranks.
    """

    def __init__(self, parameters: Sequence[DTensor], wires: WireFormats) -> None:
        """Take the parameters that one FSDP module shards, in its order."""
        self.wires = [wires[p] for p in parameters if p.requires_grad]
        self.shapes = [p.shape for p in parameters if p.requires_grad]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer."""
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
        total = reduce_scatter(input_tensor.view(ranks, -1).float(), widths, self.wires, group)
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


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
        gradient.tensors["values"].copy_(total.numbers)
    else:
        gradient.tensors["codes"].copy_(total.numbers)
        gradient.tensors["scales"].copy_(total.scale)


def _unit_parameters(module: torch.nn.Module) -> list[DTensor]:
    """The parameters that one FSDP module shards, in its order: children first, no nested modules."""
    parameters: dict[DTensor, None] = {}

    def walk(submodule: torch.nn.Module) -> None:
        for child in submodule.children():
            if not isinstance(child, FSDPModule):
                walk(child)
        for p in submodule.parameters(recurse=False):
            if isinstance(p, DTensor):
                parameters[p] = None

    walk(module)
    return list(parameters)

"""Lets FSDP shard layers whose weights are stored or sent in low precision, with the state of those weights.

    with quantized_fsdp(block):
        fully_shard(block, mesh=mesh)
    ...
    optimizer.step()
    renew_gather_scales(model)

FSDP shards the weight. The low-precision weight, its master and its gradient are sharded here in the same
way, with scales that all ranks share (`quantization.sharding`), and the bytes of the low-precision weight are
sent. FSDP sums gradients over the ranks in float32, or in the formats of the recipes
(`quantize_fsdp_reduce`); after each such sum they are added to the low-precision gradients. One collective
computes the scales of all gradients of a module.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from narrowgauge.distributed.quantized_reduce import WireFormats, reduce_scatter, wire_formats
from narrowgauge.formats import RandomStream
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.weight import WeightGather, make_weight_state, sync_scales
from narrowgauge.quantization import (
    Cast,
    NarrowTensor,
    ParamState,
    QuantizedState,
    TensorShard,
    ensure_state,
    full_axis,
    make_cast,
    state_of,
)
from narrowgauge.quantization.state.gradient_state import add_all
from narrowgauge.quantization.state.narrow_tensor import make_plain
from narrowgauge.system.collectives import Group
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import local_tensor

FP32 = make_cast("fp32")


@contextmanager
def quantized_fsdp(module: torch.nn.Module, only_narrow: bool = False) -> Iterator[None]:
    """Surround `fully_shard` of a module, so that weights are stored and sent in the formats of their
    recipes.

    Every process enters it for the same modules in the same order.

    Args:
        module: The module to shard.
        only_narrow: For a loop that does not call `renew_gather_scales` and reads `parameter.grad`: weights
            stored in fp32 are then sent by FSDP as usual, and gradients are stored in fp32.
    """
    layers = (m for m in module.modules() if isinstance(m, Linear))
    if only_narrow:
        layers = (layer for layer in layers if layer.state_at_rest is not None)
    unsharded = {layer: _detach_state(layer) for layer in layers if not isinstance(layer.weight, DTensor)}
    yield
    collector = GradCollector()
    for layer, (state, shard) in unsharded.items():
        _attach_state(layer, state, shard, None if only_narrow else collector)


def renew_gather_scales(model: torch.nn.Module) -> None:
    """Compute the scales of all weights that are sent in a scaled format; call it after each weight update.

    One all-reduce serves all weights that the same processes hold. The scales are bit for bit those that each
    layer would compute alone.
    """
    by_groups: dict[tuple[object, ...], list[WeightGather]] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.gathering is not None and layer.gathering.needs_scale:
            by_groups.setdefault(tuple(layer.gathering.shard.groups), []).append(layer.gathering)
    for gatherings in by_groups.values():
        sync_scales(gatherings)


def _detach_state(layer: Linear) -> tuple[ParamState | None, TensorShard]:
    """Take the values of a low-precision weight off it; returns the weight's record and its shard.

    FSDP shards a parameter on the meta device without allocating memory.
    """
    weight, state = layer.weight, layer.state_at_rest
    layer.state_at_rest = None
    shard = state_of(weight).shard or TensorShard(tuple(full_axis(n) for n in weight.shape))
    if isinstance(weight, NarrowTensor):
        make_plain(weight, torch.empty(weight.shape, device="meta"))
    return state, shard


def _attach_state(
    layer: Linear, full: ParamState | None, shard: TensorShard, collector: "GradCollector | None"
) -> None:
    """Give a layer, whose weight FSDP has sharded, its shard of the full weight's record.

    Without a collector the gradient remains FSDP's.
    """
    parameter = layer.weight
    assert isinstance(parameter, DTensor), "quantized_fsdp surrounds a call of fully_shard"
    local_shard, rows = _shard_and_rows(shard, parameter)
    ensure_state(parameter).shard = local_shard
    layer.is_sharded = True
    if full is not None:
        layer.state_at_rest = _shard_state(full, layer, rows, FP32 if collector is None else None)
        if collector is not None:
            collector.expect(layer)
    weight = state_of(parameter).weight
    if weight is not None or (collector is not None and layer.recipe["gather"].name != "fp32"):
        layer.gathering = WeightGather(layer.recipe["gather"], parameter, weight, local_shard)


def note_shards(module: torch.nn.Module, divided: Mapping[str, TensorShard | None]) -> None:
    """Record the shard of each parameter for which `quantized_fsdp` recorded none; `divided` has the shards
    of parameters that were split before FSDP."""
    for name, p in module.named_parameters():
        if isinstance(p, DTensor) and state_of(p).shard is None:
            shard = divided.get(name) or TensorShard(tuple(full_axis(n) for n in p.shape))
            ensure_state(p).shard = _shard_and_rows(shard, p)[0]


def _shard_and_rows(shard: TensorShard, parameter: DTensor) -> tuple[TensorShard, slice]:
    """The shard of a parameter, by its placements on any mesh; and its local rows in the parameter."""
    first, *others = shard.axes
    rows, mesh = slice(0, first.length), parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            rank, ranks = mesh.get_local_rank(dim), mesh.size(dim)
            length = -(-first.length // ranks)
            rows = slice(rank * length, (rank + 1) * length)
            first = first.chunk(rank, ranks, mesh.get_group(dim))
    return TensorShard((first, *others)), rows


def _shard_state(full: ParamState, layer: Linear, rows: slice, grad: Cast | None) -> ParamState | None:
    """The record of a shard: the full weight's bytes, except that scales of multi-row blocks are recomputed.

    With `grad` the gradient is stored in that cast, not in the recipe's. None if there is nothing to store.
    """
    recipe, stored = layer.recipe, full.master or full.weight
    parameter: torch.Tensor = layer.weight
    assert isinstance(parameter, DTensor)
    numbers = local_tensor(parameter) if stored is None else stored.read()[rows]
    casts = dict(recipe.state) if grad is None else {**recipe.state, "grad": grad}
    state = make_weight_state(layer.weight, casts, recipe.offload, numbers)
    if state is None:
        return None
    if grad is not None:
        state.gradient = None
    for to, of in ((state.weight, full.weight), (state.master, full.master)):
        if to is not None and of is not None:
            _copy_rows(to, of, rows)
    return state


def _copy_rows(to: QuantizedState, of: QuantizedState, rows: slice) -> None:
    for name, tensor in of.tensors.items():
        local = tensor[rows] if tensor.ndim and len(tensor) == of.shape[0] else tensor
        if local.shape == to.tensors[name].shape:  # not for blocks of several rows, laid out on the shard
            to.tensors[name].copy_(local)


class GradCollector:
    """Waits for all gradients that FSDP sums in one collective, then adds them to the narrow gradients."""

    def __init__(self) -> None:
        self._layers: dict[Linear, torch.Tensor] = {}
        self._arrived: set[Linear] = set()

    def expect(self, layer: Linear) -> None:
        """Wait for the gradient of this layer's weight as well."""
        self._layers[layer] = layer.weight
        layer.weight.register_post_accumulate_grad_hook(partial(self._arrive, layer))

    @torch.no_grad()
    def _arrive(self, layer: Linear, _: torch.Tensor) -> None:
        self._arrived.add(layer)
        if len(self._arrived) < len(self._layers):
            return
        self._arrived.clear()
        gradients, tensors, streams = [], [], []
        for each, parameter in self._layers.items():
            state, total = each.state_at_rest, parameter.grad
            assert state is not None
            assert state.gradient is not None
            assert total is not None
            # Replicas of a shard see different samples but need the same random bits: these count sums.
            first = state.gradient.sums * parameter.numel()
            streams.append(None if each.keys is None else RandomStream(each.keys[-1], first))
            tensors.append(local_tensor(total).float())
            gradients.append(state.gradient)
            parameter.grad = None  # frees FSDP's sum
        add_all(gradients, tensors, streams)


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

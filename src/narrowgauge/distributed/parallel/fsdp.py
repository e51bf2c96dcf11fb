"""Layers whose weights FSDP cuts into shards, and the state of those weights with them.

    with narrow_shards(block):
        fully_shard(block, mesh=mesh)
    ...
    optimizer.step()
    renew_gather_scales(model)

A weight at rest in narrow numbers, its master and its gradient become those of the shard, on whose `part` of
the whole their scales are agreed (`quantization.part`); the weight's own bytes travel. A gradient at rest
takes what FSDP has summed over the processes, after each backward pass that ends in a sum; those of a module
that is cut as a whole are taken together, so that their scales are agreed on at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed.tensor import DTensor, Shard

from narrowgauge.formats import RandomStream
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.sharded.gathered_weight import PlaceholderShard, WeightGather, sync_scales
from narrowgauge.nn.weight_state import make_weight_state
from narrowgauge.quantization import (
    ParamState,
    QuantizedState,
    TensorShard,
    ensure_state,
    full_axis,
    state_of,
)
from narrowgauge.quantization.state.gradient_state import add_all
from narrowgauge.torch_compat import local_tensor


@contextmanager
def quantized_fsdp(module: torch.nn.Module) -> Iterator[None]:
    """Let what is cut within travel and rest as recipes say: around `fully_shard` of this module.

    Every process enters it for the same modules in the same order.
    """
    every = (m for m in module.modules() if isinstance(m, Linear))
    whole = {layer: _detach_state(layer) for layer in every if not isinstance(layer.weight, DTensor)}
    yield
    sums = GradCollector()
    for layer, (state, part) in whole.items():
        _attach_state(layer, state, part, sums)


def renew_gather_scales(model: torch.nn.Module) -> None:
    """Agree on the scales of all weights that travel in scaled numbers: after each change of the weights.

    One all-reduce for all weights that the same processes hold; bit for bit what each layer would find.
    """
    model_group: dict[tuple[object, ...], list[WeightGather]] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.gathering is not None and layer.gathering.needs_scale:
            model_group.setdefault(tuple(layer.gathering.shard.groups), []).append(layer.gathering)
    for gatherings in model_group.values():
        sync_scales(gatherings)


def _detach_state(layer: Linear) -> tuple[ParamState | None, TensorShard]:
    """Take the numbers of a narrow weight out of its parameter; (its record, its shard)."""
    weight, state = layer.weight, layer.state_at_rest
    shard = state_of(weight).shard or TensorShard(tuple(full_axis(n) for n in weight.shape))
    if state is not None and state.weight is not None:
        strides = torch.empty(weight.shape, device="meta").stride()
        layer.weight = torch.nn.Parameter(
            PlaceholderShard(weight.shape, strides, weight.device), weight.requires_grad
        )
    return state, shard


def _attach_state(layer: Linear, full: ParamState | None, shard: TensorShard, sums: "GradCollector") -> None:
    """Give a layer whose weight has been cut its shard of everything."""
    parameter = layer.weight
    assert isinstance(parameter, DTensor), "narrow_shards is for modules that fully_shard cuts within"
    own, rows = _cut(shard, parameter)
    ensure_state(parameter).shard = own
    layer.is_sharded = True
    if full is not None:
        layer.state_at_rest = _shard_state(full, layer, rows)
        sums.expect(layer)
    weight = state_of(parameter).weight
    if weight is not None or layer.recipe.gather.name != "fp32":
        layer.gathering = WeightGather(layer.recipe.gather, parameter, weight, own)


def _cut(part: TensorShard, parameter: DTensor) -> tuple[TensorShard, slice]:
    """Where the shard lies in the whole of which the parameter is `part`, and its rows in the parameter."""
    first, *others = part.axes
    rows, mesh = slice(0, first.length), parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            rank, ranks = mesh.get_local_rank(dim), mesh.size(dim)
            each = -(-first.length // ranks)
            rows = slice(rank * each, (rank + 1) * each)
            first = first.chunk(rank, ranks, mesh.get_group(dim))
    return TensorShard((first, *others)), rows


def _shard_state(full: ParamState, layer: Linear, rows: slice) -> ParamState:
    """The record of a shard, bit for bit that of the full weight where its bytes can be cut."""
    recipe, stored = layer.recipe, full.master or full.weight
    parameter: torch.Tensor = layer.weight
    assert isinstance(parameter, DTensor)
    numbers = local_tensor(parameter) if stored is None else stored.read()[rows]
    state = make_weight_state(layer.weight, recipe.state, recipe.offload, numbers)
    assert state is not None
    for to, of in ((state.weight, full.weight), (state.master, full.master)):
        if to is not None and of is not None:
            _copy_rows(to, of, rows)
    return state


def _copy_rows(to: QuantizedState, of: QuantizedState, rows: slice) -> None:
    for name, tensor in of.tensors.items():
        here = tensor[rows] if tensor.ndim and len(tensor) == of.shape[0] else tensor
        if here.shape == to.tensors[name].shape:  # blocks of several rows were laid on the shard
            to.tensors[name].copy_(here)


class GradCollector:
    """Gradients that FSDP sums together, and hands over one after the other: the last one takes them all."""

    def __init__(self) -> None:
        """Of no layer yet."""
        self._layers: dict[Linear, torch.Tensor] = {}
        self._arrived: set[Linear] = set()

    def expect(self, layer: Linear) -> None:
        """Take the sum of a layer's weight, too."""
        self._layers[layer] = layer.weight
        layer.weight.register_post_accumulate_grad_hook(partial(self._arrive, layer))

    def _arrive(self, layer: Linear, _: torch.Tensor) -> None:
        self._arrived.add(layer)
        if len(self._arrived) == len(self._layers):
            self._arrived.clear()
            collect_grads(self._layers)


@torch.no_grad()
def collect_grads(parameters: Mapping[Linear, torch.Tensor]) -> None:
    """Add what FSDP has summed to the gradients at rest of these layers' shards, and forget it."""
    gradients, tensors, streams = [], [], []
    for layer, parameter in parameters.items():
        state, total = layer.state_at_rest, parameter.grad
        assert state is not None
        assert state.gradient is not None
        assert total is not None
        # The same on all copies of a shard, which meet other samples: sums are counted instead.
        first = state.gradient.sums * parameter.numel()
        streams.append(None if layer.keys is None else RandomStream(layer.keys[-1], first))
        tensors.append(local_tensor(total).float())
        gradients.append(state.gradient)
        parameter.grad = None
    add_all(gradients, tensors, streams)

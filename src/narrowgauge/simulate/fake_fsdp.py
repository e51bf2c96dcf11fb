"""Simulates FSDP2 in a step on meta tensors, which FSDP2 itself refuses.

A sharded module allocates and frees memory as under FSDP2:

    before its forward pass     the shards of all its weights are gathered into one buffer and copied out
    after it                    with ZeRO 3 the full weights are freed, except the root's
    before its backward pass    they are gathered again
    after it                    full gradients are copied into one buffer and summed; the shards are kept

A buffer lives until that of the next module has arrived, because FSDP gathers ahead while it computes. The
collectives run on simulated processes (`fake_mesh.py`), so the same code counts the bytes as in a run.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.collectives import all_gather_rows, comm_tag
from narrowgauge.distributed.comm.grad_hooks import WIDE, wire_formats
from narrowgauge.distributed.comm.quantized_reduce import reduce_scatter
from narrowgauge.distributed.comm.shared_scales import WireFormat
from narrowgauge.distributed.fsdp import collect_grads, fsdp_shard
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.formats import torch_dtype
from narrowgauge.nn import Linear
from narrowgauge.nn.weight import GatheredWeight, make_weight_state
from narrowgauge.quantization import (
    Cast,
    QuantizedState,
    TensorShard,
    ensure_state,
    full_axis,
    make_cast,
    state_of,
)
from narrowgauge.torch_compat import is_in_backward, tensors_in


class Buffers:
    """The live communication buffers: the last gathered weights and the last gradients to be summed."""

    gathered: torch.Tensor | None = None
    summed: torch.Tensor | None = None


class FakeParam:
    """A parameter of a module: full while GEMMs use it, else a shard.

    Attributes:
        owners: the modules that have the parameter, each with its attribute's name.
        shape: shape of the full parameter.
        rows: rows of the longest shard, which every rank sends.
        shard: the local shard.
        full: the full parameter; its memory is freed between passes.
    """

    def __init__(
        self, full: nn.Parameter, owners: Sequence[tuple[nn.Module, str]], mesh: Mesh, axis: str
    ) -> None:
        """Replace the full parameter by this rank's shard along an axis."""
        self.owners, self.layer, self.shape = owners, owners[0][0], full.shape
        unsharded = state_of(full).shard or TensorShard(tuple(full_axis(n) for n in full.shape))
        local_shard = fsdp_shard(unsharded, mesh, axis)
        self.rows = -(-self.shape[0] // mesh.size(axis))
        self.shard = nn.Parameter(torch.empty(local_shard.local_shape, device="meta"), full.requires_grad)
        state = ensure_state(self.shard)
        state.shard, state.gathered_shape = local_shard, self.shape
        if isinstance(self.layer, Linear) and owners[0][1] == "weight":
            self._shard_layer(self.layer)
        self.full: nn.Parameter | None = None
        self.assign(self.shard)

    def _shard_layer(self, layer: Linear) -> None:
        layer.is_sharded = True
        layer.weight = self.shard
        values = torch.empty(self.shard.shape, device="meta")
        layer.state_at_rest = make_weight_state(self.shard, layer.recipe.state, layer.recipe.offload, values)

    def _gathered(self) -> torch.Tensor:
        """The gathered weight: float32, or in the format of the layer's cast."""
        cast, narrow = make_cast("fp32"), state_of(self.shard).weight
        if isinstance(self.layer, Linear) and self.owners[0][1] == "weight":
            cast = self.layer.recipe.gather
        if narrow is None and cast.name == "fp32":
            self.memory = torch.empty(self.shape, device="meta")
            return self.memory
        self.memory = torch.empty(self.shape, dtype=gather_dtype(cast, narrow), device="meta")
        scale = torch.empty((), device="meta") if cast.is_scaled else None
        if narrow is None and cast.is_scaled:  # `WeightGather` keeps them for the step
            self.codes = torch.empty(self.shard.shape, dtype=torch.uint8, device="meta")
        return GatheredWeight(self.memory, scale, cast, narrow is None)

    def make_full(self) -> nn.Parameter:
        """Make the full parameter in the first forward pass."""
        self.full = nn.Parameter(self._gathered(), self.shard.requires_grad)
        return self.full

    def assign(self, parameter: nn.Parameter) -> None:
        """Assign the full parameter, or the shard, to the modules."""
        for owner, key in self.owners:
            setattr(owner, key, parameter)

    def resize(self, is_gathered: bool) -> None:
        """Allocate or free the memory of the full parameter."""
        size = self.memory.numel() * self.memory.element_size() if is_gathered else 0
        self.memory.untyped_storage().resize_(size)

    @property
    def sent_numel(self) -> int:
        """The number of elements that each rank sends: its padded shard."""
        return self.rows * self.shape[1:].numel()


def gather_dtype(cast: Cast, narrow: QuantizedState | None) -> torch.dtype:
    """The dtype in which a weight is gathered."""
    if narrow is not None:
        if not cast.is_scaled and narrow.cast.is_scaled:
            return torch.float32
        return next(iter(narrow.tensors.values())).dtype
    return torch.uint8 if cast.is_scaled else torch_dtype(cast.element) or torch.float32


class FakeFSDPUnit:
    """A module whose parameters are gathered, and whose gradients are summed, in one collective."""

    def __init__(
        self, module: nn.Module, mesh: Mesh, reshard_after_forward: bool, buffers: Buffers, axis: str
    ) -> None:
        """Shard the module's parameters over the ranks of an axis, except in nested units."""
        self.mesh, self.reshard_after_forward, self.buffers = mesh, reshard_after_forward, buffers
        self.axis = axis
        self.is_gathered, self.gradients, self.passes = False, 0, 0
        self.params = [FakeParam(p, owners, mesh, axis) for p, owners in _unit_parameters(module).items()]
        self.wires: dict[torch.Tensor, WireFormat] = wire_formats(module)
        module.fake_fsdp_unit = self  # type: ignore[assignment]
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self._after_forward)

    @torch.no_grad()
    def gather(self, *_: Any) -> None:
        """Gather the full parameters unless they are already gathered."""
        if self.is_gathered or not self.params:
            return
        self.is_gathered = True
        for param in self.params:
            if param.full is None:
                param.make_full().register_post_accumulate_grad_hook(self._after_gradient)
        if self.mesh.size(self.axis) > 1:  # a single process copies its shards, which are whole
            with comm_tag("gather"):
                nbytes = sum(p.sent_numel * p.memory.element_size() for p in self.params)
                sent = torch.empty(nbytes, dtype=torch.uint8, device="meta")
                self.buffers.gathered = all_gather_rows(sent, self.mesh.group(self.axis))
        for param in self.params:
            param.resize(is_gathered=True)
            assert param.full is not None
            param.assign(param.full)

    def _after_forward(self, module: nn.Module, inputs: Any, out: Any) -> None:
        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(self.gather)
        if self.reshard_after_forward and not is_in_backward():
            self.reshard()

    def reshard(self) -> None:
        """Free the full parameters."""
        self.is_gathered = False
        for param in self.params:
            param.resize(is_gathered=False)
            param.assign(param.shard)

    def _after_gradient(self, _: torch.Tensor) -> None:
        """Count a full gradient; sum the gradients once all are computed."""
        self.gradients += 1
        if self.gradients < len(self.params):
            return
        self.gradients, self.passes = 0, self.passes + 1
        is_last = self.passes == self.mesh.micro_batches
        dims = self.mesh.parallel_dims
        if is_last or (dims.zero > 1 and dims.stages == 1):  # torch's pipelines reduce once a step
            self._reduce()
            self.reshard()
        if is_last:
            self.passes = 0

    @torch.no_grad()
    def _reduce(self) -> None:
        ranks, group = self.mesh.size(self.axis), self.mesh.group(self.axis)
        widths = [p.sent_numel for p in self.params]
        flat_RS = torch.empty(ranks, sum(widths), device="meta")
        self.buffers.summed = flat_RS
        for param in self.params:
            assert param.full is not None
            param.full.grad = None
        wires = [self.wires.get(p.shard, WIDE) for p in self.params]
        total = reduce_scatter(flat_RS, widths, wires, group) if ranks > 1 else flat_RS[0].clone()
        if self.mesh.parallel_dims.replicate > 1:
            with comm_tag("reduce"):
                dist.all_reduce(total, group=self.mesh.group("replicate"))
        for param in self.params:
            if param.shard.grad is None:
                param.shard.grad = total.new_empty(param.shard.shape)
        collect_grads(
            {
                p.layer: p.shard
                for p in self.params
                if isinstance(p.layer, Linear) and state_of(p.shard).gradient is not None
            }
        )


def _unit_parameters(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The parameters of a module without nested units, each with all (module, attribute) that have it."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}

    def walk(submodule: nn.Module) -> None:
        if getattr(submodule, "fake_fsdp_unit", None) is not None:
            return
        for key, p in submodule.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((submodule, key))
        for child in submodule.children():
            walk(child)

    walk(module)
    return owners


def full_weights(model: nn.Module, mesh: Mesh) -> int:
    """Bytes of the weights that stay gathered after a forward pass: with ZeRO 3, all except the blocks'."""
    if not mesh.parallel_dims.is_sharded:
        return 0
    layers = {m.weight: m for m in model.modules() if isinstance(m, Linear)}
    total = 0
    for name, p in model.named_parameters():
        if mesh.parallel_dims.zero == 3 and name.startswith("blocks."):
            continue
        dtype, state = torch.float32, state_of(p)
        if p in layers and (state.weight is not None or layers[p].recipe.gather.name != "fp32"):
            dtype = gather_dtype(layers[p].recipe.gather, state.weight)
        total += (state.gathered_shape or p.shape).numel() * dtype.itemsize
    return total

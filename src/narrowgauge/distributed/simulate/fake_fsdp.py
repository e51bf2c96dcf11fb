"""What FSDP2 does in a step, done to tensors without numbers, which FSDP2 itself refuses.

The memory of a module that is cut over processes comes and goes as there:

    before its forward pass     the shards of all its weights are gathered into one buffer, and copied out
    after it                    the whole weights go (ZeRO 3; the root's stay, and all with ZeRO 1 and 2)
    before its backward pass    they are gathered again
    after it                    whole gradients are put into one buffer, summed, and each keeps its shard

A buffer on its way stays until that of the next module has arrived, for FSDP gathers ahead while it
computes. The collectives are started like FSDP's, on processes that are not there (`fake_mesh.py`), so that
bytes are counted by the same code as a run's.
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
from narrowgauge.distributed.fsdp import collect_grads
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.simulate.fake_mesh import FakeMesh
from narrowgauge.formats import torch_dtype
from narrowgauge.nn import Linear
from narrowgauge.nn.gathered_weight import GatheredWeight
from narrowgauge.nn.weight_state import make_weight_state
from narrowgauge.quantization import (
    Cast,
    QuantizedState,
    TensorShard,
    ensure_state,
    full_axis,
    make_cast,
    state_of,
)
from narrowgauge.torch_compat import is_in_backward


class Buffers:
    """What of all modules is on its way: the last gathered, the last gradients to be summed."""

    gathered: torch.Tensor | None = None
    summed: torch.Tensor | None = None


class FakeShards:
    """One parameter of a module: whole while it is computed with, a shard else."""

    def __init__(self, whole: nn.Parameter, owners: Sequence[tuple[nn.Module, str]], mesh: FakeMesh) -> None:
        """Put the shard in place of the whole."""
        self.owners, self.layer = owners, owners[0][0]
        uncut = state_of(whole).shard or TensorShard(tuple(full_axis(n) for n in whole.shape))
        first, *others = uncut.axes
        own = TensorShard((first.chunk(mesh.index("fsdp"), mesh.size("fsdp"), mesh.group("fsdp")), *others))
        self.shape, self.own, self.is_tied = whole.shape, own, False
        self.rows = -(-self.shape[0] // mesh.size("fsdp"))  # of each shard on its way
        self.shard = nn.Parameter(torch.empty(own.local_shape, device="meta"), whole.requires_grad)
        state = ensure_state(self.shard)
        state.shard, state.gathered_shape = own, self.shape
        if isinstance(self.layer, Linear) and owners[0][1] == "weight":
            self._cut_layer(self.layer)
        self.whole: nn.Parameter | None = None
        self.show(self.shard)

    def _cut_layer(self, layer: Linear) -> None:
        layer.is_sharded = True
        layer.weight = self.shard
        numbers = torch.empty(self.own.local_shape, device="meta")
        layer.state_at_rest = make_weight_state(self.shard, layer.recipe.state, layer.recipe.offload, numbers)

    def _numbers(self) -> torch.Tensor:
        """The whole weight as it arrives: float32, or the numbers of the layer's cast."""
        cast, narrow = make_cast("fp32"), state_of(self.shard).weight
        if isinstance(self.layer, Linear) and self.owners[0][1] == "weight":
            cast = self.layer.recipe.gather
        if narrow is None and cast.name == "fp32":
            self.memory = torch.empty(self.shape, device="meta")
            return self.memory
        self.memory = torch.empty(self.shape, dtype=travelling(cast, narrow), device="meta")
        scale = torch.empty((), device="meta") if cast.is_scaled else None
        return GatheredWeight(self.memory, scale, cast, narrow is None)

    def begin(self) -> nn.Parameter:
        """Make the whole parameter, in the first forward pass."""
        self.whole = nn.Parameter(self._numbers(), self.shard.requires_grad)
        return self.whole

    def show(self, parameter: nn.Parameter) -> None:
        """Let the module have the whole parameter, or the shard."""
        for owner, key in self.owners:
            setattr(owner, key, parameter)

    def allocate(self, is_there: bool) -> None:
        """Give the whole parameter its memory, or take it."""
        size = self.memory.numel() * self.memory.element_size() if is_there else 0
        self.memory.untyped_storage().resize_(size)


def _nbytes(held: FakeShards) -> int:
    """Of a shard on its way."""
    return held.rows * held.shape[1:].numel() * held.memory.element_size()


def travelling(cast: Cast, narrow: QuantizedState | None) -> torch.dtype:
    """The dtype in which a weight is gathered."""
    if narrow is not None:
        if not cast.is_scaled and narrow.cast.is_scaled:
            return torch.float32
        return next(iter(narrow.tensors.values())).dtype
    return torch.uint8 if cast.is_scaled else torch_dtype(cast.element) or torch.float32


class FakeFSDPUnit:
    """A module whose parameters are gathered and summed together."""

    def __init__(self, module: nn.Module, mesh: FakeMesh, again: bool, buffers: Buffers) -> None:
        """Cut what is not cut yet within; `again`: gathered again for the backward pass."""
        self.mesh, self.again, self.buffers = mesh, again, buffers
        self.here, self.arrived, self.passes = False, 0, 0
        self.held = [FakeShards(p, owners, mesh) for p, owners in _own(module).items()]
        self.wires: dict[torch.Tensor, WireFormat] = wire_formats(module)
        module.imagined_unit = self  # type: ignore[assignment]
        module.register_forward_pre_hook(self.gather)
        module.register_forward_hook(self._after_forward)

    @torch.no_grad()
    def gather(self, *_: Any) -> None:
        """Bring the shards together, if they are not."""
        if self.here or not self.held:
            return
        self.here = True
        for held in self.held:
            if held.whole is None:
                held.begin().register_post_accumulate_grad_hook(self._after_gradient)
        with comm_tag("gather"):
            own = torch.empty(sum(map(_nbytes, self.held)), dtype=torch.uint8, device="meta")
            self.buffers.gathered = all_gather_rows(own, self.mesh.group("fsdp"))
        for held in self.held:
            held.allocate(True)
            assert held.whole is not None
            held.show(held.whole)

    def _after_forward(self, module: nn.Module, inputs: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self.gather)
        if self.again and not is_in_backward():
            self.cut()

    def cut(self) -> None:
        """Let the whole weights go."""
        self.here = False
        for held in self.held:
            held.allocate(False)
            held.show(held.shard)

    def _after_gradient(self, _: torch.Tensor) -> None:
        """One whole gradient has come: when all have, sum them."""
        self.arrived += 1
        if self.arrived < len(self.held):
            return
        self.arrived, self.passes = 0, self.passes + 1
        is_last = self.passes == self.mesh.micro_batches
        once = (
            self.mesh.parallel_dims.zero == 1 or self.mesh.parallel_dims.stages > 1
        )  # as torch's pipelines have it
        if is_last or not once:
            self._sum()
            self.cut()
        if is_last:
            self.passes = 0

    @torch.no_grad()
    def _sum(self) -> None:
        ranks, group = self.mesh.size("fsdp"), self.mesh.group("fsdp")
        widths = [h.rows * h.shape[1:].numel() for h in self.held]
        flat_RS = torch.empty(ranks, sum(widths), device="meta")
        self.buffers.summed = flat_RS
        for held in self.held:
            assert held.whole is not None
            held.whole.grad = None
        wires = [self.wires.get(h.shard, WIDE) for h in self.held]
        own = reduce_scatter(flat_RS, widths, wires, group)
        if self.mesh.parallel_dims.replicate > 1:
            with comm_tag("reduce"):
                dist.all_reduce(own, group=self.mesh.group("replicate"))
        for held in self.held:
            shape = held.own.local_shape
            if held.shard.grad is None:
                held.shard.grad = own.new_empty(shape)
        collect_grads(
            {
                held.layer: held.shard
                for held in self.held
                if isinstance(held.layer, Linear) and state_of(held.shard).gradient is not None
            }
        )


def _own(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """A module's parameters that no unit within has, each with all who have it."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}

    def walk(part: nn.Module) -> None:
        if getattr(part, "imagined_unit", None) is not None:
            return
        for key, p in part.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(p, []).append((part, key))
        for child in part.children():
            walk(child)

    walk(module)
    return found


def fake_fully_shard(module: nn.Module, mesh: FakeMesh, again: bool) -> None:
    """As `fully_shard` of a module, on the meta device."""
    buffers = mesh.__dict__.setdefault("buffers", Buffers())
    FakeFSDPUnit(module, mesh, again, buffers)


def full_weights(model: nn.Module, mesh: Mesh) -> int:
    """Bytes of weights that are gathered at the end of a forward pass: with ZeRO 3, all but the blocks'."""
    if not mesh.parallel_dims.is_sharded:
        return 0
    layers = {m.weight: m for m in model.modules() if isinstance(m, Linear)}
    total = 0
    for name, p in model.named_parameters():
        if mesh.parallel_dims.zero == 3 and name.startswith("blocks."):
            continue
        dtype, state = torch.float32, state_of(p)
        if p in layers and (state.weight is not None or layers[p].recipe.gather.name != "fp32"):
            dtype = travelling(layers[p].recipe.gather, state.weight)
        total += (state.gathered_shape or p.shape).numel() * dtype.itemsize
    return total

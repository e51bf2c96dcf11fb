"""From a model's configuration to this process's shards of it, with their initial values.

    1. build the full model without values (meta device), under its recipe: its layers are numbered
    2. remove the layers of other pipeline stages; shard the others over `tensor` and `context`
    3. keep this process's experts of each layer, if they are divided over `expert`
    4. draw one parameter after another, shard it, and give it to its layer; a block that has all of them is
       sharded over `shard` (FSDP2) at once: no process ever holds more than one full block, the embedding and
       its shards

The values are those with which a single process would start.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.fsdp import note_shards, quantize_fsdp_reduce, quantized_fsdp
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.quantized_reduce import quantized_comm_hook, wire_formats
from narrowgauge.nn import DTYPES, Linear, apply_recipe
from narrowgauge.quantization import ensure_state, state_of
from narrowgauge.recipes import Recipe
from narrowgauge.system.collectives import comm_tag
from narrowgauge.system.torch_compat import ignore_in_ddp
from narrowgauge.trainer.distributed.parallel.layers import divide_experts, local_experts, shard_blocks
from narrowgauge.trainer.distributed.pipeline import Stage, keep_stages, stages_of
from narrowgauge.trainer.models import Expert, ModelConfig, Transformer, starting_values


class Objective(nn.Module):
    """The loss of a model, as a module: what data parallelism wraps and a step calls."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x_BT: torch.Tensor,
        y_BT: torch.Tensor,
        position_BT: torch.Tensor | None = None,
        targets: int | None = None,
    ) -> torch.Tensor:
        """The loss of the local tokens, as `Transformer.loss`."""
        return self.model.loss(x_BT, y_BT, position_BT, targets)


@dataclass(frozen=True)
class ModelSpec:
    """A model, its recipe, and everything else that its forward pass depends on."""

    model: ModelConfig
    recipe: Recipe
    seed: int  # the seed of the initial weights and of the token order
    rounding_seed: int  # the seed of stochastic rounding
    backend: str = "auto"  # whether narrow GEMMs run natively: "auto", "native" or "emulated"
    recompute: int = 0  # one block in this many recomputes its activations in the backward pass; 0: none does
    selective: bool = False  # whether those recompute only their MLP
    chunked_loss: bool = False  # whether head and loss are computed in chunks, without all logits in memory
    z_loss: float = 0.0  # the coefficient of the z-loss; 0: none
    balance_loss: float = 0.0  # the coefficient of the experts' balance loss; 0: none
    batch_size: int = 1  # sequences of a step, by which processes number the tokens they exchange

    def set_options(self, model: Transformer) -> None:
        """Apply to a model the options that belong neither to its dimensions nor to its recipe."""
        model.recompute, model.selective = self.recompute, self.selective
        model.chunked_loss = self.chunked_loss
        model.z_loss, model.balance_loss = self.z_loss, self.balance_loss


def parallelize(spec: ModelSpec, mesh: Mesh, device: torch.device) -> tuple[Transformer, list[nn.Module]]:
    """Create this process's shards of a model; on the meta device, a model without values.

    Returns:
        The model, and the modules that compute with it: one `Objective`, or the `Stage`s of this process in a
        pipeline.
    """
    with torch.device("meta"):
        model = Transformer(spec.model, DTYPES[spec.recipe.compute])
    spec.set_options(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    # The meta device supports no format; each layer chooses its backend again when it gets its weights.
    apply_recipe(model, spec.recipe, "emulated" if spec.backend == "emulated" else "auto")
    keep_stages(model, mesh)
    shard_blocks(model, mesh)
    divide_experts(model, mesh, spec.batch_size)
    shards = {name: state_of(p).shard for name, p in model.named_parameters()}
    _fill(model, spec, shapes, mesh, device)
    modules: list[nn.Module] = [Objective(model)]
    if (stages := mesh.parallel_dims.stages) > 1:
        modules = [Stage(model, number, stages) for number in stages_of(mesh)]
    if mesh.parallel_dims.is_sharded:
        for module in modules:
            _apply_fsdp(module, mesh)
        note_shards(model, shards)
        for module in modules:
            quantize_fsdp_reduce(module)
    elif mesh.size("data") > 1:
        modules = [_apply_ddp(module, mesh) for module in modules]
    if mesh.first_last_group is not None and spec.model.tied_head:
        ensure_state(model.embedding.weight).holders = Fraction(2)
    for p in local_experts(model).parameters():
        ensure_state(p).holders = Fraction(1, mesh.size("expert"))
    return model, modules


def _fill(
    model: Transformer, spec: ModelSpec, shapes: Mapping[str, torch.Size], mesh: Mesh, device: torch.device
) -> None:
    """Give every parameter its values, and shard each block as soon as it has them."""
    missing = dict(model.named_parameters())
    for name, value in _values(spec, shapes, device):
        if name not in missing:
            continue
        owner, _, key = name.rpartition(".")
        shard = state_of(missing.pop(name)).shard
        parameter = nn.Parameter((value if shard is None else shard.local_of(value)).to(device))
        ensure_state(parameter).shard = shard
        setattr(model.get_submodule(owner), key, parameter)
        block = ".".join(name.split(".")[:2])
        if block.startswith("blocks.") and not any(other.startswith(f"{block}.") for other in missing):
            _bind_layers(model.get_submodule(block))
            if mesh.parallel_dims.is_sharded:
                for expert in local_experts(model.get_submodule(block)):
                    _apply_fsdp(expert, mesh)
                _apply_fsdp(model.get_submodule(block), mesh)
    if model.head is not None:
        model.tie_head()
        _bind_layers(model.head)


def _values(
    spec: ModelSpec, shapes: Mapping[str, torch.Size], device: torch.device
) -> Iterable[tuple[str, torch.Tensor]]:
    """The starting value of each parameter; on the meta device an empty tensor for each."""
    if device.type != "meta":
        return starting_values(spec.model, shapes, spec.seed)
    return ((name, torch.empty(shape, device=device)) for name, shape in shapes.items())


def _bind_layers(block: nn.Module) -> None:
    """Make the layers of a block use their new parameters."""
    for layer in block.modules():
        if isinstance(layer, Linear):
            layer.set_weights(layer.weight, layer.bias)


def _apply_fsdp(module: nn.Module, mesh: Mesh) -> None:
    """Shard a module's parameters over `shard` and `context`, an expert's over `expert_shard`.

    Sums of gradients are not divided.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    is_root = isinstance(module, Objective | Stage)  # the backward pass begins with a root's own parameters
    reshard = mesh.parallel_dims.zero == 3 and not is_root
    is_expert = isinstance(module, Expert)
    ranks = mesh.expert_mesh if is_expert else mesh.fsdp_mesh
    with quantized_fsdp(module):
        fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=reshard)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _apply_ddp(objective: nn.Module, mesh: Mesh) -> DistributedDataParallel:
    """Sum gradients over `data`; each process keeps full weights."""
    group = mesh.group("data")
    # Buffers hold values of a process's sequences, which differ between processes. Gradients at rest are
    # outside autograd: the engine sums them.
    ignored = [name for name, _ in objective.named_buffers()]
    ignored += [name for name, p in objective.named_parameters() if state_of(p).gradient is not None]
    ignore_in_ddp(objective, ignored)
    wrapped = DistributedDataParallel(
        objective, process_group=group, init_sync=False, gradient_as_bucket_view=True
    )
    wires = wire_formats(objective)
    if any(wire.is_narrow for wire in wires.values()):
        wrapped.register_comm_hook(None, quantized_comm_hook(wires, group))
    else:
        wrapped.register_comm_hook(group, _sum)
    return wrapped


def _sum(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The sum of a bucket's gradients, in place of DDP's mean."""
    total = bucket.buffer()
    with comm_tag("reduce"):
        work = dist.all_reduce(total, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: total)

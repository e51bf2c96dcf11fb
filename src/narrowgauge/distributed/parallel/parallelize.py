"""From a model's configuration to this process's pieces of it, with their starting values.

    1. the whole model without numbers (meta device), under its recipe: layers know their numbers in it
    2. the layers of other pipeline stages go; the others are divided over `tensor` and `context`
    3. parameter after parameter is drawn, cut, and given to its layer; a block that has all of them is cut
       over `shard` (FSDP2) at once: no process ever holds more than that, the embedding and its pieces

The numbers are those that one process alone would start with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.comm.grad_hooks import quantize_fsdp_reduce, quantized_comm_hook, wire_formats
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.parallel.fsdp import quantized_fsdp
from narrowgauge.distributed.parallel.pipeline_stage import Stage, keep_stages, stages_of
from narrowgauge.distributed.parallel.tensor_parallel import shard_blocks
from narrowgauge.distributed.simulate.fake_fsdp import fake_fully_shard
from narrowgauge.distributed.simulate.fake_mesh import FakeMesh
from narrowgauge.models import ModelConfig, Transformer, starting_values
from narrowgauge.nn import DTYPES, Linear, convert
from narrowgauge.quantization import TensorShard
from narrowgauge.quantization.purpose import comm_tag
from narrowgauge.recipes import Recipe


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
        """As `Transformer.loss`, of the tokens that are here."""
        return self.model.loss(x_BT, y_BT, position_BT, targets)


@dataclass(frozen=True)
class ModelSpec:
    """What decides a model's numbers, but for the optimizer."""

    model: ModelConfig
    recipe: Recipe
    seed: int
    backend: str = "auto"
    recompute: int = 0
    chunked_loss: bool = False


def parallelize(plan: ModelSpec, mesh: Mesh, device: torch.device) -> tuple[Transformer, list[nn.Module]]:
    """This process's pieces of the model, and the modules that compute with them.

    One, the `Objective`, or the stages of this process in a pipeline.
    """
    with torch.device("meta"):
        model = Transformer(plan.model, DTYPES[plan.recipe.compute])
    model.recompute, model.chunked_loss = plan.recompute, plan.chunked_loss
    shapes = {name: p.shape for name, p in model.named_parameters()}
    # Without numbers there is no device that could have the formats; with them, each layer looks again.
    convert(model, plan.recipe, backend="emulated" if plan.backend == "emulated" else "auto")
    keep_stages(model, mesh)
    shard_blocks(model, mesh)
    parts = {name: p.part for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    _fill(model, plan, shapes, mesh, device)
    modules: list[nn.Module] = [Objective(model)]
    if (stages := mesh.layout.stages) > 1:
        modules = [Stage(model, number, stages) for number in stages_of(mesh)]
    if mesh.layout.is_cut:
        for module in modules:
            _cut(module, mesh)
        for name, p in model.named_parameters():
            if not hasattr(p, "part"):  # weights of linear layers have theirs (`nn.shards`)
                p.part = _cut_part(parts[name], mesh)  # type: ignore[attr-defined]
        for module in modules:
            quantize_fsdp_reduce(module)
    elif mesh.size("data") > 1:
        modules = [_replicated(module, mesh) for module in modules]
    if mesh.ends is not None and plan.model.tied_head:
        model.embedding.weight.stages = 2  # type: ignore[attr-defined]
    return model, modules


def _fill(
    model: Transformer, plan: ModelSpec, shapes: Mapping[str, torch.Size], mesh: Mesh, device: torch.device
) -> None:
    """Give every parameter its numbers; blocks are cut when they have theirs."""
    missing = dict(model.named_parameters())
    for name, value in _values(plan, shapes, device):
        if name not in missing:
            continue
        owner, key = _owner(model, name)
        part: TensorShard = missing.pop(name).part  # type: ignore[attr-defined]
        parameter = nn.Parameter(part.local_of(value).to(device))
        parameter.part = part  # type: ignore[attr-defined]
        setattr(owner, key, parameter)
        block = ".".join(name.split(".")[:2])
        if block.startswith("blocks.") and not any(other.startswith(f"{block}.") for other in missing):
            _begin(model.get_submodule(block))
            if mesh.layout.is_cut:
                _cut(model.get_submodule(block), mesh)
    if model.head is not None:
        model.tie_head()
        _begin(model.head)


def _values(
    plan: ModelSpec, shapes: Mapping[str, torch.Size], device: torch.device
) -> Iterable[tuple[str, torch.Tensor]]:
    """The starting value of each parameter, or what stands for it where there are no numbers."""
    if device.type != "meta":
        return starting_values(plan.model, shapes, plan.seed)
    return ((name, torch.empty(shape, device=device)) for name, shape in shapes.items())


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, key = name.rpartition(".")
    return model.get_submodule(module), key


def _begin(block: nn.Module) -> None:
    """Let the layers take over their parameters."""
    for layer in block.modules():
        if isinstance(layer, Linear):
            layer.set_weights(layer.weight, layer.bias)


def _cut(module: nn.Module, mesh: Mesh) -> None:
    """Cut a module's parameters over `shard` and `context`; sums of gradients are not divided."""
    layout = mesh.layout
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    is_root = isinstance(module, Objective | Stage)  # what these have themselves is needed at once again
    again = layout.zero == 3 and not is_root
    if isinstance(mesh, FakeMesh):
        fake_fully_shard(module, mesh, again)
        return
    with quantized_fsdp(module):
        fully_shard(module, mesh=mesh.cuts, mp_policy=whole, reshard_after_forward=again)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _cut_part(part: TensorShard, mesh: Mesh) -> TensorShard:
    first, *others = part.axes
    return TensorShard((first.chunk(mesh.index("cut"), mesh.size("cut"), mesh.group("cut")), *others))


def _replicated(objective: nn.Module, mesh: Mesh) -> DistributedDataParallel:
    """Sum gradients over `data`, whole weights staying on each process."""
    group = mesh.group("data")
    # Buffers say which sequences a process has: they are each process's own. Gradients at rest in narrow
    # numbers are no autograd's business: the engine sums them.
    own = [name for name, _ in objective.named_buffers()]
    own += [name for name, p in objective.named_parameters() if getattr(p, "gradient", None) is not None]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(objective, own)
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
    """The sum of a bucket's gradients, where DDP would take their mean."""
    if bucket.buffer().is_meta:
        return _sum_simulated(group, bucket)
    with comm_tag("reduce"):
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _sum_simulated(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The same among processes that are not there, whose work has no future."""
    with comm_tag("reduce"):
        dist.all_reduce(bucket.buffer(), group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

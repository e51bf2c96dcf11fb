"""Data parallelism in your own training loop: torch's DDP and FSDP2 around a converted model.

    model = DistributedDataParallel(ng.prepare_ddp(ng.convert(model, "msamp-o2")))

    for block in model.blocks:
        ng.fully_shard(block)
    ng.fully_shard(model)

DDP sums the gradients that autograd holds, in float32, and sends the values of weights. `prepare_ddp` takes
low-precision weights out of its hands: a hook at the end of the backward pass sums their gradients over DDP's
process group in the format of the recipe's place `reduce`, with the same code as the package's own training,
and process 0 sends masters as well. The amax histories of delayed scaling are reduced with them. Everything
else in DDP works as usual: `no_sync`, buckets, the mean.

FSDP2 shards parameters. `fully_shard` shards the state of a low-precision weight along with it, and sends the
weight's bytes. Gradients remain FSDP2's float32 gradients, so `parameter.grad` is what a loop expects.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.fsdp import FP32, note_shards, quantize_fsdp_reduce, quantized_fsdp
from narrowgauge.distributed.quantized_reduce import all_reduce_gradient_states, wire_formats
from narrowgauge.nn.histories import ChannelChoice, History, reduce_histories
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.step_state import Stepped
from narrowgauge.quantization import GradientState, state_of, stored_tensor
from narrowgauge.quantization.state.parameter_state import drop_gradient
from narrowgauge.system.collectives import Group, all_reduce_max_, broadcast_bytes, rank_in
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.torch_compat import active_ddp, after_backward, ignore_in_ddp, tensors_in


@checked
def prepare_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """Let the `DistributedDataParallel` that will wrap a module reduce its low-precision gradients as well.

    Args:
        module: The module that DDP will wrap, with layers that `convert` has changed; modified in place.

    Returns:
        The module. Its replicas stay bit-identical under every recipe: process 0 sends its weights to all
        before the first forward pass, and gradients are averaged. Each process draws different random bits.
        They match the step's samples if each process passes the index of its first sample to
        `set_step`.

    Raises:
        UserError: No parameter would be left for DDP, which then refuses to wrap the module.
    """
    narrow = {name for name, p in module.named_parameters() if state_of(p).gradient is not None}
    if narrow and not any(p.requires_grad and n not in narrow for n, p in module.named_parameters()):
        raise UserError(
            "DistributedDataParallel needs a trainable parameter whose gradient is fp32, and this module has "
            "only weights in narrow formats: keep a layer wide (`convert(..., keep=[...])`), or add a bias"
        )
    # Buffers of layers belong to a process's own samples and passes, and DDP would overwrite them.
    buffers = (f"{n}.{b}".lstrip(".") for n, layer in _layers(module) for b, _ in layer.named_buffers())
    ignore_in_ddp(module, [*narrow, *buffers])
    stepped = (m for m in module.modules() if isinstance(m, Stepped))
    has_histories = any(isinstance(m, History) for m in module.modules())
    if narrow or has_histories or any(m.is_random for m in stepped):
        reduction = _Reduction()
        module.register_forward_pre_hook(reduction.before_forward)
        module.register_forward_hook(reduction.after_forward)
    return module


@checked
def fully_shard(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Shard a module like torch's `fully_shard`, including the low-precision state of its weights.

    Blocks and scales are laid out on the full weights, so sharding does not change the results of a recipe. A
    low-precision weight is sent as its bytes, and its gradient is summed in the format of the recipe's place
    `reduce`. The sum is stored in float32, as `parameter.grad`, whatever the recipe's place `grad` specifies.

    Args:
        module: The module, with or without layers that `convert` has changed.
        options: Arguments of torch's function, except `shard_placement_fn`: `mesh`, `mp_policy` and so on.

    Returns:
        The module.

    Raises:
        UserError: Low-precision weights have no values yet (meta device), or would be sharded along another
            dimension than the first, or moved to host memory by torch; or layers keep channels, which each
            process would choose by itself.
    """
    if any(isinstance(m, ChannelChoice) for m in module.modules()):
        raise UserError(
            "keep_channels under narrowgauge.fully_shard: each process would choose other channels; train "
            "with `narrowgauge train`, or under DistributedDataParallel with narrowgauge.prepare_ddp"
        )
    if options.get("shard_placement_fn") is not None:
        raise UserError("narrowgauge.fully_shard shards the first dimension: leave out shard_placement_fn")
    is_offloaded = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    if is_offloaded and any(layer.state_at_rest is not None for _, layer in _layers(module)):
        raise UserError(
            "torch's CPUOffloadPolicy does not move codes, scales and masters of low-precision weights: "
            "leave offload_policy out, and name the places for host memory in the recipe's list `offload`"
        )
    for name, layer in _layers(module):
        if layer.state_at_rest is not None and layer.weight.is_meta:
            raise UserError(
                f"layer {name!r} stores its weight in low precision and has no values yet (meta device): "
                "give it values before narrowgauge.fully_shard (`to_empty` and `load_state_dict`), or "
                "start from the meta device under a recipe whose weights and gradients are fp32: fp8, "
                "mxfp8, nvfp4, coat and others"
            )
    with quantized_fsdp(module, only_narrow=True):
        torch_fully_shard(module, **options)
    note_shards(module, {})
    mesh: DeviceMesh | None = options.get("mesh")  # ranks in it are in row-major order
    rank = rank_in(torch.distributed.group.WORLD)
    _use_process(module, rank if mesh is None else mesh.mesh.flatten().tolist().index(mesh.get_rank()))
    if any(layer.recipe.state["grad"] != FP32 for _, layer in _layers(module)):
        quantize_fsdp_reduce(module)
    return module


class _Reduction:
    """Gives each process its random bits; at the end of a backward pass, reduces what DDP does not handle.

    Attributes:
        group: The process group of the DDP that ran the last forward pass; None if it is not to sync.
        is_queued: Whether the reduction waits for the end of the current backward pass.
        is_synced: Whether all processes have process 0's low-precision weights.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self.is_queued = False
        self.is_synced = False
        self.module: torch.nn.Module | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Record which DDP runs the forward pass, and whether its gradients are needed."""
        ddp = active_ddp()
        if ddp is not None and not self.is_synced:
            _require_prepared(module, ddp)
            _send_state(module, ddp.process_group)
            _use_process(module, rank_in(ddp.process_group))
            self.is_synced = True
        if torch.is_grad_enabled():
            will_sync = ddp is not None and ddp.require_backward_grad_sync
            self.group = ddp.process_group if will_sync and ddp is not None else None
            self.module, self.is_queued = module, False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        """Wait for the backward pass from this output."""
        if self.group is None or not torch.is_grad_enabled():
            return
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        if not outputs:
            raise UserError(
                f"no tensor with a gradient was found in the output of the wrapped module, a "
                f"{type(output).__name__}, so its narrow gradients could not be summed: return tensors, or "
                "tuples, lists, dicts or dataclasses of them"
            )
        for tensor in outputs:
            tensor.register_hook(self._begin)

    def _begin(self, _: torch.Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            after_backward(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Replace each low-precision gradient by its mean over processes, and each amax by the largest."""
        self.is_queued = False
        assert self.group is not None
        assert self.module is not None
        narrow, wires = _gradients(self.module), wire_formats(self.module)
        if narrow:
            used = torch.tensor([float(not g.is_empty) for g in narrow.values()])
            used = used.to(next(iter(narrow)).device)
            all_reduce_max_([used], self.group)
            all_reduce_gradient_states(list(narrow.values()), [wires[p] for p in narrow], self.group)
        for p, gradient in narrow.items():
            gradient.scale_by(torch.tensor(1 / self.group.size(), device=p.device))
        for p, is_used in zip(narrow, used.tolist() if narrow else (), strict=True):
            if not is_used:  # on any process: DDP leaves such a parameter without a gradient
                drop_gradient(p)
        reduce_histories(self.module.modules(), self.group)


def _gradients(module: torch.nn.Module) -> dict[torch.Tensor, GradientState]:
    """The low-precision gradients of the trainable parameters."""
    trained = (p for p in module.parameters() if p.requires_grad)
    return {p: gradient for p in trained if (gradient := state_of(p).gradient) is not None}


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, Linear]]:
    return ((name, m) for name, m in module.named_modules() if isinstance(m, Linear))


def _use_process(module: torch.nn.Module, process: int) -> None:
    """Let every layer draw this process's random bits until a loop specifies the samples of a pass."""
    for layer in module.modules():
        if isinstance(layer, Stepped):
            layer.use_process(process)


def _require_prepared(module: torch.nn.Module, ddp: DistributedDataParallel) -> None:
    """Refuse a wrapper whose ignored gradients differ from those that are reduced here."""
    narrow = {n for n, p in module.named_parameters() if state_of(p).gradient is not None}
    left_out = {n for n, _ in module.named_parameters()} & ddp.parameters_to_ignore
    if ddp.module is module and narrow != left_out:
        raise UserError(
            f"{min(narrow ^ left_out)} is under another recipe than when prepare_ddp was called: call it "
            "after the last `convert`"
        )
    if ddp.module is not module:
        raise UserError(
            f"prepare_ddp was given {type(module).__name__}, and DistributedDataParallel wraps "
            f"{type(ddp.module).__name__}: give prepare_ddp the very module that is wrapped (torch.compile "
            "comes after the wrapping)"
        )


def _send_state(module: torch.nn.Module, group: Group) -> None:
    """Send process 0's low-precision weights, with all their state, to all processes."""
    tensors = []
    for _, layer in _layers(module):
        state = state_of(layer.weight)
        if state.gradient is not None:
            tensors += [stored_tensor(layer.weight), *state.tensors().values()]
        if layer.reduce_prescale is not None:
            tensors += layer.reduce_prescale.tensors.values()
    device = next(module.parameters()).device
    for tensor in tensors:
        broadcast_bytes(tensor, group, device)

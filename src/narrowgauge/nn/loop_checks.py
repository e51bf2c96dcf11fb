"""What torch's tools would silently do wrong in a user's training loop.

    DistributedDataParallel      sends weights without their masters: these follow at the first pass
    fully_shard                  shards values without their codes, masters and gradients: refused
    torch's encoder fast path    multiplies by the weights and bypasses the recipe: switched off

Micro-batches are not optimizer steps. `count_steps` notifies layers whenever an optimizer steps. If a loop
called `set_step` once and never again, a warning is raised.
"""

import warnings
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowgauge.quantization import ParamState, state_of
from narrowgauge.system.collectives import broadcast_bytes
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import active_ddp

_COUNTING: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # in order
_FRESH: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()  # optimizers; None once they are checked
_SENT: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()  # wrappers whose masters are sent


def count_steps(layer: Any) -> None:
    """From now on, notify a layer of each step of any optimizer in this process.

    The optimizer may belong to another model. Its step then also ends a step of this layer, which has no
    effect if the layer has not run since.
    """
    _COUNTING[layer] = None
    _listen_to_optimizers()


def counting_layers() -> list[Any]:
    """The living layers that `count_steps` has seen, of all models, the oldest first."""
    return list(_COUNTING)


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_state)
    register_optimizer_step_post_hook(_notify_layers)


def _check_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warn once of what an optimizer does not keep of recipes; ours, and one without state, are fresh."""
    is_fresh = _FRESH.setdefault(optimizer, not optimizer.state or hasattr(optimizer, "recipe"))
    if optimizer.state and is_fresh is not None:
        _FRESH[optimizer] = None
        for text in dict.fromkeys(t for layer in counting_layers() for t in layer.lost(optimizer, is_fresh)):
            warnings.warn(f"{type(optimizer).__name__} {text}", stacklevel=2)


def _notify_layers(*_: Any) -> None:
    for layer in counting_layers():
        layer.optimizer_stepped()


def send_masters(record: ParamState | None) -> None:
    """In the first training pass of a DistributedDataParallel, send process 0's masters to all.

    When it wraps a model it sends values alone, of the weights that it does not ignore. Process 0 then keeps
    its masters, because its values stay the same; the other processes have masters of rounded values until
    now. A pass for evaluation sends nothing, because perhaps only one process takes it. In the first training
    pass every process must reach a layer whose weight has a master.
    """
    if record is None or record.master is None:
        return
    ddp = active_ddp()
    if ddp is None or ddp in _SENT or not (ddp.training or torch.is_grad_enabled()):
        return
    _SENT[ddp] = None
    for name, p in ddp.module.named_parameters():
        master = state_of(p).master
        if master is not None and name not in ddp.parameters_to_ignore:
            master.wait()
            for tensor in master.tensors.values():
                broadcast_bytes(tensor.detach(), ddp.process_group, p.device)


def refuse_fsdp(state: ParamState | None) -> None:
    """Refuse torch's FSDP on a weight with a record, which FSDP would not shard.

    FSDP2 cuts a parameter by `chunk`, `new_zeros` and `copy_`, so that its shard holds values without codes
    and masters. A subclass cannot change that by its hooks: they learn of the mesh at the first gather,
    and shards share a scale already when a checkpoint or an initialization writes to them.
    """
    if state is not None:
        raise UserError(
            "torch's fully_shard does not shard the low-precision state of a weight: call "
            "narrowgauge.fully_shard instead (FSDP2), or use a recipe whose weights and gradients are "
            "fp32: fp8, mxfp8, mxfp4, nvfp4, coat and others"
        )


def leave_fast_path(model: torch.nn.Module) -> None:
    """Make torch's transformer encoder call its linear layers in evaluation as well."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # the fast path needs relu or gelu
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False

"""Checks against silent mistakes of a user's training loop.

    DistributedDataParallel      does not sum gradients that are stored in a cast
    fully_shard                  shards values without their codes, masters and gradients
    torch's encoder fast path    multiplies by the weights and bypasses the recipe

The first two raise an error; the last is switched off.

Micro-batches are not optimizer steps. `count_steps` notifies layers whenever an optimizer steps. If a loop
called `set_step` once and never again, a warning is raised. What another optimizer has computed for narrow
weights is rounded at the end of its step.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge.errors import UserError
from narrowgauge.quantization import GradientState, ParamState, state_of
from narrowgauge.quantization.state.parameter_state import round_updates
from narrowgauge.torch_compat import active_ddp, ask_at_wrapping, parameters_of_ddp


class CountsSteps(Protocol):
    """A layer that counts the steps of optimizers."""

    def optimizer_stepped(self) -> None:
        """Count a step of an optimizer."""


#: Optimizer steps after one `set_step` before a warning. Adversarial training takes a few on purpose.
MOST_STEPS_UNSET = 10

_COUNTING: WeakKeyDictionary[CountsSteps, None] = WeakKeyDictionary()  # in order


def count_steps(layer: CountsSteps) -> None:
    """From now on, notify a layer of each step of any optimizer in this process.

    The optimizer may belong to another model. Its step then also ends a step of this layer, which has no
    effect if the layer has not run since.
    """
    _COUNTING[layer] = None
    _listen_to_optimizers()


def counting_layers() -> list[CountsSteps]:
    """The living layers that `count_steps` has seen, of all models, the oldest first."""
    return list(_COUNTING)


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_post_hook(_notify_layers)


def _notify_layers(*_: Any) -> None:
    round_updates()
    for layer in counting_layers():
        layer.optimizer_stepped()


def warn_of_still_step(step: int | None, taken: int) -> None:
    """Warn that a loop has set a step and has taken several since without setting another."""
    warnings.warn(
        f"{taken} optimizer steps were taken since narrowgauge.set_step set step {step}; random bits, "
        "delayed scales and rules still belong to that step: call narrowgauge.set_step before each "
        "forward pass, or narrowgauge.step after each update",
        stacklevel=2,
    )


def require_sum(parameter: torch.Tensor, gradient: GradientState) -> None:
    """Refuse a forward pass under DistributedDataParallel without `prepare_ddp`.

    Without it, DistributedDataParallel reduces the parameter itself.

    Raises:
        UserError: The replicas would diverge.
    """
    if (ddp := active_ddp()) is None:
        return
    if not gradient.is_summed or any(p is parameter for p in parameters_of_ddp(ddp)):
        raise _needs_prepare_ddp()


def refuse_wrapping(model: torch.nn.Module) -> None:
    """Make DistributedDataParallel raise an error when it wraps a model with low-precision gradients.

    `require_sum` handles modules that contain the model.
    """
    records = [state_of(p) for p in model.parameters()]
    if any(record.gradient is not None for record in records):
        ask_at_wrapping(model, _Unprepared(records))


class _Unprepared:
    """The list of parameters for DDP to ignore: it is empty, or raises an error when DDP reads it.

    It holds records, because a later `convert` changes them.
    """

    def __init__(self, records: Sequence[ParamState]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[str]:
        if any(record.gradient is not None and not record.gradient.is_summed for record in self.records):
            raise _needs_prepare_ddp()
        return iter(())


def _needs_prepare_ddp() -> UserError:
    return UserError(
        "DistributedDataParallel does not sum gradients that a recipe stores in low precision, and replicas "
        "would diverge: call narrowgauge.prepare_ddp(model) before DistributedDataParallel(model)"
    )


def refuse_fsdp(state: ParamState | None) -> None:
    """Refuse torch's FSDP on a weight with a record, which FSDP would not shard.

    Raises:
        UserError: The weight or its gradient is stored in a cast.
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

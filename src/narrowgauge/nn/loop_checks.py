"""Checks against silent mistakes of a user's training loop.

    DistributedDataParallel      would not sum gradients that are stored in a cast
    fully_shard                  would shard values without their codes, masters and gradients
    torch's encoder fast path    would multiply by the weights and bypass the recipe

The first two raise an error; the last is switched off.

Micro-batches are not optimizer steps. `count_steps` notifies layers whenever an optimizer steps. If a loop
called `set_step` once and never again, a warning is raised. What another optimizer has computed for narrow
weights is rounded at the end of its step.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

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


#: Optimizer steps in what a loop calls one step. Adversarial training takes some, a loop that forgot more.
MOST_UNSAID = 10

_COUNTING: WeakSet[CountsSteps] = WeakSet()


def count_steps(layer: CountsSteps) -> None:
    """From now on, notify a layer of each step that an optimizer of torch's (or ours) takes in this process.

    The optimizer may be that of another model. Its step then ends a step of this layer as well, which changes
    nothing if the layer has seen nothing.
    """
    _COUNTING.add(layer)
    _listen_to_optimizers()


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_post_hook(_notify_layers)


def _notify_layers(*_: Any) -> None:
    round_updates()
    for layer in list(_COUNTING):
        layer.optimizer_stepped()


def warn_of_still_step(step: int | None, taken: int) -> None:
    """Warn of a loop that set a step, and then took several without setting another."""
    warnings.warn(
        f"{taken} optimizer steps were taken since narrowgauge.set_step said step {step}, and random bits, "
        "delayed scales and rules stay those of that step: call narrowgauge.set_step before each forward "
        "pass, or narrowgauge.step after each update",
        stacklevel=2,
    )


def require_sum(parameter: torch.Tensor, gradient: GradientState) -> None:
    """Refuse a forward pass under a DistributedDataParallel that `prepare_ddp` has not prepared.

    One that reduces the parameter itself is not the prepared one.

    Raises:
        UserError: Its replicas would drift apart.
    """
    if (ddp := active_ddp()) is None:
        return
    if not gradient.is_summed or any(p is parameter for p in parameters_of_ddp(ddp)):
        raise _needs_prepare_ddp()


def refuse_wrapping(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel refuse a model with narrow gradients when it wraps it, not a step later.

    A module around the model is refused by `require_sum`.
    """
    records = [state_of(p) for p in model.parameters()]
    if any(record.gradient is not None for record in records):
        ask_at_wrapping(model, _Unprepared(records))


class _Unprepared:
    """Stands where DDP reads the names that it leaves out: there are none, or an error.

    It holds records, because another `convert` changes them.
    """

    def __init__(self, records: Sequence[ParamState]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[str]:
        if any(record.gradient is not None and not record.gradient.is_summed for record in self.records):
            raise _needs_prepare_ddp()
        return iter(())


def _needs_prepare_ddp() -> UserError:
    return UserError(
        "DistributedDataParallel does not sum gradients that a recipe keeps in narrow numbers, and replicas "
        "would drift apart: call narrowgauge.prepare_ddp(model) before DistributedDataParallel(model)"
    )


def refuse_fsdp(state: ParamState | None) -> None:
    """Refuse FSDP around a weight whose record it would leave behind.

    Raises:
        UserError: Weight or gradient are narrow.
    """
    if state is not None:
        raise UserError(
            "torch's fully_shard leaves behind what a recipe keeps for a weight in narrow numbers: call "
            "narrowgauge.fully_shard in its place (FSDP2), or take a recipe whose weights and gradients are "
            "fp32: fp8, mxfp8, mxfp4, nvfp4, coat and others"
        )


def leave_fast_path(model: torch.nn.Module) -> None:
    """Make torch's transformer encoder call its linear layers in evaluation as well."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # the fast path asks for one of the two
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False

"""Checks against what a training loop of one's own could do wrongly without a word.

    another optimizer            would move the raw numbers of a weight that is kept in a cast
    DistributedDataParallel      would sum zeros, as narrow gradients are outside of autograd
    torch's encoder fast path    would multiply with the weights, past the recipe

The first two are refused in a sentence. The last is switched off.
"""

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowgauge.errors import UserError
from narrowgauge.quantization import state_of
from narrowgauge.torch_compat import ddp_parameters


@cache
def refuse_other_optimizers() -> None:
    """From now on, let no optimizer but ours take a step with a weight that is kept in a cast."""
    register_optimizer_step_pre_hook(_require_narrow_state)


def _require_narrow_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if getattr(optimizer, "takes_narrow_state", False):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if (weight := state_of(p).weight) is not None:
                raise UserError(
                    f"{type(optimizer).__name__} cannot update a weight that is kept as "
                    f"{weight.cast.name!r}: use narrowgauge.AdamW or narrowgauge.Muon with the model's "
                    "recipe, or a recipe whose weights are fp32"
                )


def require_no_ddp(weight: torch.Tensor) -> None:
    """Refuse a forward pass under a DistributedDataParallel that would reduce a weight's narrow gradient.

    Raises:
        UserError: It would.
    """
    if any(p is weight for p in ddp_parameters()):
        raise UserError(
            "DistributedDataParallel does not sum gradients that a recipe keeps in narrow numbers, and "
            "replicas would drift apart: use `narrowgauge train` under torchrun, or the recipe with fp32 in "
            "the places weight, grad and reduce and without a master (`Recipe.with_places`)"
        )


def leave_fast_path(model: torch.nn.Module) -> None:
    """Let torch's transformer encoder call its linear layers in evaluation, too."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # the fast path asks for one of the two
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False

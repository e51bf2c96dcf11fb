"""AdamW on fp32 state (Loshchilov & Hutter, arXiv 1711.05101), and its state as plain tensors.

Matrices decay, vectors (norms, biases) do not. The moments are saved and restored by parameter name here,
not through torch's `load_state_dict`, which casts every state tensor to the parameter's dtype.
"""

import torch

from narrowgauge.errors import UserError


def make_adamw(
    model: torch.nn.Module, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Torch's fused AdamW over a model's parameters; the learning rate is set by `set_learning_rate`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `{"PARAMETER.exp_avg": tensor, ...}`; empty before the first step.

    The tensors are the optimizer's own, which the next step changes.
    """
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = value
    return state


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Put a copy of saved state back, every tensor in the dtype in which it was saved.

    Raises:
        UserError: the tensors are not this model's.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, field = key.rpartition(".")
        if name not in parameters:
            raise UserError(
                f"the checkpoint's optimizer has state for {name!r}, which this model has not; "
                "use the run's own configuration"
            )
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise UserError(
                f"the checkpoint's optimizer state {key!r} has shape {tuple(value.shape)}, but this model's "
                f"parameter has {tuple(parameter.shape)}; use the run's own configuration"
            )
        optimizer.state[parameter][field] = value.to(parameter.device, copy=True)

"""The norm of all gradients of a model, in any format and over any number of processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from narrowgauge.optim.groups import shares_memory
from narrowgauge.quantization import gradient_of, local_tensor, shard_of, state_of
from narrowgauge.system.torch_compat import norm_each, scale_each


@dataclass(frozen=True)
class ModelGroup:
    """The processes that share a model, and the number of copies of each parameter."""

    group: dist.ProcessGroup
    for_each: int


def clip_grad_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, model_group: ModelGroup | None
) -> torch.Tensor:
    """Scale gradients to a global norm of at most `max_norm`; see `Optimizer.clip_grad_norm_`."""
    norms = _norms(parameters, norm_type)
    if not norms and model_group is None:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    total = _global_norm(norms, norm_type, model_group).float()
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for p in parameters:
        if (narrow := state_of(p).gradient) is not None:
            narrow.scale_by(factor.to(p.device))
        elif p.grad is not None:
            if shares_memory(local_tensor(p.grad)):
                p.grad = p.grad.clone()  # of its own memory
            by_device.setdefault(p.device, []).append(local_tensor(p.grad))
    for device, gradients in by_device.items():
        scale_each(gradients, factor.to(device))
    return total


def _norms(parameters: Sequence[torch.Tensor], norm_type: float) -> dict[torch.Tensor, torch.Tensor]:
    """The norm of each gradient, 0-dim float64, in the order of the parameters."""
    # the state first: `grad` would decode a low-precision gradient and keep the values
    wide = {p: p.grad for p in parameters if state_of(p).gradient is None and p.grad is not None}
    found = norm_each([local_tensor(g) for g in wide.values()], norm_type, torch.float64)
    norms = dict(zip(wide, found, strict=True))
    for p in parameters:
        if p not in norms and (gradient := gradient_of(p)) is not None:
            norms[p] = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
    return {p: norms[p] for p in parameters if p in norms}


def _global_norm(
    norms: Mapping[torch.Tensor, torch.Tensor], norm_type: float, model_group: ModelGroup | None
) -> torch.Tensor:
    """The norm of all gradients of the model, given the norms of this process; 0-dim float64."""
    device = next(iter(norms), torch.zeros((), device="cpu")).device
    if model_group is None:
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for p, norm in norms.items():
            by_groups.setdefault(_shard_groups(p), []).append(norm.to(device))
        parts = [_norm_over(groups, torch.stack(n), norm_type) for groups, n in by_groups.items()]
        return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), norm_type)
    assert norm_type != torch.inf, "a sum over processes"
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p, norm in norms.items():
        shard = shard_of(p)
        holders = model_group.for_each * state_of(p).holders
        copies = holders // (1 if shard is None else shard.shard_count)  # each copy adds the same
        total += norm.to(device) ** norm_type / copies
    dist.all_reduce(total, group=model_group.group)
    return total ** (1 / norm_type)


def _shard_groups(p: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups that hold the shards of a parameter; none if it is not sharded."""
    if not isinstance(p, DTensor):
        return ()
    mesh = p.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(p.placements) if placement.is_shard())


def _norm_over(groups: Sequence[dist.ProcessGroup], norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm over these norms and the norms of the other processes in the groups; 0-dim float64."""
    total = torch.linalg.vector_norm(norms, norm_type)
    is_max = norm_type == torch.inf
    for group in groups:
        power = total if is_max else total**norm_type
        dist.all_reduce(power, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
        total = power if is_max else power ** (1 / norm_type)
    return total

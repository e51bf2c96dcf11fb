"""The state of a sharded parameter, as torch's checkpoints take it.

`torch.distributed.checkpoint` takes plain tensors for copies of one another and keeps one process's; DTensors
it divides again among the processes that load them. So the state dict of an optimizer holds, of a parameter
that FSDP2 has sharded:

    elements, scales of rows        DTensors, sharded as the parameter is
    scales of tensors, positions    plain tensors, the same in all processes
    histories                       DTensors with a row for each process, as each sees other samples
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import local_tensor


def as_saved(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's state for a state dict; not copied."""
    t = t.view(torch.uint8) if t.element_size() == 1 else t  # gloo sends no FP8
    if not isinstance(p, DTensor) or not t.ndim:
        return t
    if len(t) != len(local_tensor(p)):
        raise UserError(
            "torch.distributed.checkpoint cannot divide scales of blocks of several rows among processes: "
            "let each process save its own narrowgauge.state_dict(model, optimizer)"
        )
    return _dtensor(t, p, p.placements, p.shape[0])


def as_row(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor of which each process has its own, for a state dict."""
    if not isinstance(p, DTensor):
        return t
    mesh = p.device_mesh
    return _dtensor(t[None], p, [Shard(0)] * mesh.ndim, mesh.size())


def as_kept(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of this process of what a state dict holds, in the shape and dtype that are kept."""
    local = local_tensor(saved)
    if local.dtype == torch.uint8 and like.element_size() == 1:
        local = local.view(like.dtype)
    return local.view(like.shape) if local.numel() == like.numel() else local


def _dtensor(t: torch.Tensor, p: DTensor, placements: Sequence[Placement], length: int) -> torch.Tensor:
    """A DTensor of `length` rows, of which this process has `t`."""
    shape = torch.Size((length, *t.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        t.contiguous(), p.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )

"""Loops of torch's own around converted models: what the tests of DDP and of FSDP2 share, on each rank."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge as ng
from narrowgauge.nn import recipe_tensors


def gathered(mine):
    """What each rank has."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def same_everywhere(tensors):
    """Whether all ranks have the same bits."""
    found = gathered({name: t.float().tolist() for name, t in tensors.items()})
    return all(other == found[0] for other in found)


def batch(number, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * rank + number))


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def unlike(ours, theirs):
    """The names of the tensors that differ."""
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def everything(model):
    moved = model.state_dict() | recipe_tensors(model)
    return {name: tensor.detach().clone() for name, tensor in moved.items()}


def net(recipe, seed=0, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        return ng.convert(nn.Sequential(*(block() for _ in range(2))), recipe)


def block():
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def cut(model, shard=ng.fully_shard, blocks=True):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*(model if blocks else ()), model]:
        shard(part, mesh=mesh)
    return model


def optimizer_of(model, recipe):
    return ng.AdamW(model.parameters(), recipe, lr=1e-2)


def steps(model, optimizer, numbers, torchs_clip=False, parts=2):
    """Some steps on the same samples everywhere, so that sums over ranks are means; the norms."""
    norms = []
    for step in numbers:
        ng.set_step(model, 0, step, 0)
        for part in range(parts):
            (model(batch(10 * step + part, rank=0)).square().mean() / 2).backward()
        clip = (
            partial(nn.utils.clip_grad_norm_, model.parameters())
            if torchs_clip
            else optimizer.clip_grad_norm_
        )
        norms.append(whole(clip(0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms

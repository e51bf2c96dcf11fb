"""A small model, cut by FSDP as an engine cuts it, and what its ranks compare: for tests of the wire."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.distributed.fsdp import quantize_fsdp_reduce, quantized_fsdp
from narrowgauge.nn.linear import Linear

D = 16


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((D,), 0.5))  # FSDP lays it after the children's
        self.norm = torch.nn.LayerNorm(D)
        self.up, self.down = torch.nn.Linear(D, width), torch.nn.Linear(width, D, bias=False)

    def forward(self, x):
        return self.gain * x + self.down(self.up(self.norm(x)).relu())


def model(recipe, width=24, transposed=False):
    """Two blocks; with `transposed` a weight of each is stored as (inputs, outputs)."""
    torch.manual_seed(0)
    net = ng.convert(torch.nn.Sequential(*(Block(width) for _ in range(2))), recipe)
    for number, block in enumerate(net if transposed else ()):
        plain = torch.nn.Linear(width, D)
        plain.bias = torch.nn.Parameter(torch.zeros(width))
        block.up = Linear(plain, block.up.recipe, 10 + number, transposed=True)
    return net


def cut(net, reshard=True, copies=1, averages=False):
    """Shard it as an engine does: every block, sums that are sums (or torch's averages)."""
    mesh = init_device_mesh(
        "cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("replicate", "shard")
    )
    for module in [*net, net]:
        with quantized_fsdp(module):
            fully_shard(module, mesh=mesh if copies > 1 else mesh["shard"], reshard_after_forward=reshard)
        if not averages:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    quantize_fsdp_reduce(net)
    return net


def batch(number):
    return torch.randn(8, D, generator=torch.Generator().manual_seed(number))


def everyone(x):
    """The tensor of every rank."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def equal(found, expected, what=""):
    """Bit for bit, NaN and signed zeros included (all NaNs are one)."""
    assert found.dtype == expected.dtype, what
    if found.dtype == torch.float32:
        found, expected = (torch.where(t.isnan(), math.nan, t).view(torch.int32) for t in (found, expected))
    assert torch.equal(found, expected), (what, (found != expected).float().mean())


def rows_of(whole, ranks, rank):
    """The rows that FSDP deals out to a rank."""
    each = -(-len(whole) // ranks)
    return whole[rank * each : (rank + 1) * each]

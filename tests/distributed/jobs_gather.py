"""What ranks do in the tests of narrow gathers: FSDP's weights in low precision against the whole model."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from narrowgauge.distributed.comm.byte_counter import CommCounter
from narrowgauge.distributed.comm.grad_hooks import quantize_fsdp_reduce
from narrowgauge.distributed.fsdp import quantized_fsdp, renew_gather_scales
from narrowgauge.nn import set_step
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import gradient_of, state_of

D = 16


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.up, self.down = torch.nn.Linear(D, width), torch.nn.Linear(width, D, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def model(recipe, width, transposed=False):
    """Two blocks; with `transposed` a weight of each is stored as (inputs, outputs)."""
    torch.manual_seed(0)
    net = ng.convert(torch.nn.Sequential(*(Block(width) for _ in range(2))), recipe)
    for number, block in enumerate(net if transposed else ()):
        plain = torch.nn.Linear(width, D)
        plain.bias = torch.nn.Parameter(torch.zeros(width))
        block.up = Linear(plain, block.up.recipe, 10 + number, transposed=True)
    return net


def shard(net, reshard=True, copies=1):
    """Cut it as an engine does: every block, sums that are sums."""
    world = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=names)
    mesh = mesh if copies > 1 else mesh["shard"]
    for block in [*net, net]:
        with quantized_fsdp(block):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    quantize_fsdp_reduce(net)
    return net


def batch(number):
    return torch.randn(8, D, generator=torch.Generator().manual_seed(number))


def everyone(x):
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def equal(found, expected, what):
    assert found.dtype == expected.dtype, what
    assert torch.equal(found, expected), (what, (found != expected).float().mean())


def rows_of(whole, ranks, rank):
    each = -(-len(whole) // ranks)
    return whole[rank * each : (rank + 1) * each]


def like_the_whole(recipe, places=None, width=24, steps=2, reshard=True, copies=1, transposed=False):
    """Two steps on the same samples everywhere: outputs, gradients and weights equal one process's."""
    recipe = ng.recipe(recipe).with_places(places or {})
    ranks, rank = dist.get_world_size() // copies, dist.get_rank() % (dist.get_world_size() // copies)
    alone = model(recipe, width, transposed)
    cut = shard(model(recipe, width, transposed), reshard, copies)
    sent, calls = [], []
    for step in range(1, steps + 1):
        x = batch(step)
        outputs = []
        for net in (alone, cut):
            set_step(net, 7, step, 0)
            with CommCounter() as traffic:
                y = net(x)
                y.square().sum().backward()
            outputs.append(y.detach())
        equal(outputs[1], outputs[0], f"outputs of step {step}")
        sent.append(dict(traffic.sent))
        calls.append(dict(traffic.calls))
        compare_gradients(alone, cut, ranks, rank, dist.get_world_size())
        for net in (alone, cut):
            update(net)
        for name, p in cut.named_parameters():
            ours, theirs = here(p), here(alone.get_parameter(name))
            equal(ours, rows_of(theirs, ranks, rank), f"{name} after step {step}")
        with CommCounter() as traffic:
            renew_gather_scales(cut)
    return {"sent": sent, "calls": calls, "renewed": [dict(traffic.sent), dict(traffic.calls)]}


def compare_gradients(alone, cut, ranks, rank, times):
    for name, p in cut.named_parameters():
        ours, theirs = gradient_of(p), gradient_of(alone.get_parameter(name))
        ours = ours.to_local() if isinstance(ours, DTensor) else ours
        if (narrow := state_of(p).gradient) is None:  # the sum of n equal ones
            torch.testing.assert_close(ours, times * rows_of(theirs, ranks, rank))
        else:
            spacing = 2.0**-narrow.cast.element.mantissa_bits
            torch.testing.assert_close(
                ours, times * rows_of(theirs, ranks, rank), rtol=2 * spacing, atol=0.05
            )


def here(p):
    if state_of(p).weight is not None:
        return state_of(p).weight.read()
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p


@torch.no_grad()
def update(net):
    """A change that is the same whoever holds what: of a weight at rest, and of its master."""
    for p in net.parameters():
        state = state_of(p)
        source = state.master or state.weight
        if source is None:
            (p.to_local() if isinstance(p, DTensor) else p).mul_(1.25).add_(0.01)
        else:
            state.write(source.read() * 1.25 + 0.01)
        p.grad = None
        if state.gradient is not None:
            state.gradient.is_empty = True


def what_is_computed_with(recipe):
    """The kinds of the weights in a forward pass, and whether all memory is given back after it."""
    net = shard(model(recipe, 24))
    seen = []
    net[0].up.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    y = net(batch(0))
    (weight,) = seen
    memory = weight.numbers.untyped_storage().size()
    y.square().sum().backward()
    return {
        "gathered": isinstance(weight, GatheredWeight),
        "looks": str(weight.dtype),
        "numbers": str(weight.numbers.dtype),
        "kept": memory,
        "shown": repr(weight),
    }


def records(recipe):
    """Places of each weight's record in and after a step: with the shard, not with what is gathered."""
    net = shard(model(recipe, 24))
    seen = []
    net[0].up.register_forward_pre_hook(lambda layer, _: seen.append("narrowgauge" in vars(layer.weight)))
    before = {name: state_of(p) for name, p in net.named_parameters()}
    net(batch(0)).square().sum().backward()
    layers = {name: m for name, m in net.named_modules() if isinstance(m, Linear)}
    for name, layer in layers.items():
        state = state_of(layer.weight)
        assert state is before[f"{name}.weight"]
        assert state.shard.local_shape == layer.weight.to_local().shape
        assert state.shard.shape == layer.weight.shape
        assert layer.state_at_rest in (None, state)
        assert all(kept.shape == state.shard.local_shape for kept in state.by_place().values())
    return {"layers": len(layers), "kept": sorted(state.by_place()), "gathered": int(seen[0])}


def accumulated(recipe, copies=1):
    """Different micro-batches on every rank; copies of shards hold the same bytes."""
    net = shard(model(recipe, 24), copies=copies)
    for number in range(3):
        set_step(net, 7, 1, 8 * dist.get_rank())
        net(batch(10 * dist.get_rank() + number)).square().sum().backward()
    world, shards = dist.get_world_size(), dist.get_world_size() // copies
    for p in net.parameters():
        stored = state_of(p).gradient
        tensors = [p.grad.to_local()] if stored is None else list(stored.tensors.values())
        assert stored is None or p.grad is None
        for tensor in tensors:
            every = everyone(tensor)
            for rank in range(world):
                equal(every[rank], every[rank % shards], "copies of a shard")


def poisoned(recipe, value):
    """One element of one shard is not finite: matmuls report it on all ranks, as with the whole weight."""
    net = shard(model(recipe, 24))
    if dist.get_rank() == 0:
        with torch.no_grad():
            net[0].up.weight.to_local()[0, 0] = value
    return int(net(batch(0)).isfinite().sum())


def without_tokens(recipe):
    net = shard(model(recipe, 24))
    y = net(batch(0)[:0])
    y.sum().backward()
    return list(y.shape)

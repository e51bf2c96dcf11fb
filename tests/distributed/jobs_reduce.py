"""What ranks do in the tests of narrow reductions. The oracle brings everything together and loops."""

import math
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.collectives import all_gather_rows, reduce_scatter_rows
from narrowgauge.distributed.comm.byte_counter import CommCounter
from narrowgauge.distributed.comm.grad_hooks import (
    all_reduce_gradient_states,
    quantize_fsdp_reduce,
    quantized_comm_hook,
    wire_formats,
)
from narrowgauge.distributed.comm.quantized_reduce import all_reduce, reduce_scatter
from narrowgauge.distributed.comm.shared_scales import WireFormat
from narrowgauge.errors import UserError
from narrowgauge.formats import decode, round_to
from narrowgauge.quantization import GradientState, PreScale, QuantContext, make_cast, quantize_in_context
from narrowgauge.quantization.scales import fp32_scale

WORLD = lambda: dist.group.WORLD  # noqa: E731


def everyone(x):
    """The tensor of every rank."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def by_hand(tensors, cast, destination, mu=1.0, encode=None):
    """The sum of the ranks' tensors as the ring of `destination` rounds it, and how it overflowed."""
    ranks = len(tensors)
    order = [tensors[(destination + k) % ranks] for k in range(1, ranks + 1)]
    if not cast.is_scaled:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[cast.name]
        total = order[0].to(dtype)
        for x in order[1:]:
            total = (total.float() + x.to(dtype).float()).to(dtype)
        return total.float()
    amax = max(float(t.abs().max()) for t in tensors)
    if not all(bool(t.isfinite().all()) for t in tensors):
        return torch.full_like(order[0], math.nan)
    if encode is None:
        encode = fp32_scale(torch.tensor(amax), cast.element, cast.scales.power_of_two)[0] * mu
    plain = make_cast({"cast": cast.name})
    codes = [quantize_in_context(x, plain, -1, QuantContext(scale=encode)) for x in order]
    values = [decode(q.codes, cast.element) for q in codes]
    total = values[0]
    for x in values[1:]:
        total = round_to(total + x, cast.element)
    return total * (1.0 / encode)


def gradients_of(shapes, spread=4.0):
    """Tensors that differ from rank to rank, some of them far larger on one."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        torch.randn(shape, generator=generator)
        * torch.randn(shape, generator=generator).mul(spread).exp2()
        * 2.0 ** (7 * i - 5 * dist.get_rank())
        for i, shape in enumerate(shapes)
    ]


def equal(found, expected):
    """Bit for bit, NaN and signed zeros included (all NaNs are one)."""
    found, expected = (torch.where(t.isnan(), math.nan, t).view(torch.int32) for t in (found, expected))
    assert torch.equal(found, expected), (found != expected).float().mean()


def scattered(casts, poison=False):
    """A buffer as FSDP lays it, against the oracle; what was sent."""
    casts = [make_cast(c) for c in casts]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    widths = [7 * (i + 1) for i in range(len(casts))]
    columns = gradients_of([(ranks, w) for w in widths])
    if poison and rank == 0:
        columns[0][ranks - 1, 3] = math.inf if poison == "inf" else math.nan
    with CommCounter() as traffic:
        found = reduce_scatter(torch.cat(columns, 1), widths, [WireFormat(c) for c in casts], WORLD())
    for cast, part, column in zip(casts, found.split(widths), columns, strict=True):
        if cast.name == "fp32":
            torch.testing.assert_close(part, sum(everyone(column))[rank])
        else:
            every = everyone(column)
            whole = by_hand(every, cast, rank)
            equal(part, whole[rank])
    return {"sent": dict(traffic.sent), "calls": dict(traffic.calls), "widths": widths}


def reduced_everywhere(casts):
    """A list of tensors of odd sizes: the same on all ranks, and the oracle's."""
    casts = [make_cast(c) for c in casts]
    ranks = dist.get_world_size()
    shapes = [(5, 3), (11,), (4, 4)][: len(casts)]
    mine = gradients_of(shapes)
    every = [everyone(x) for x in mine]
    with CommCounter() as traffic:
        all_reduce(mine, [WireFormat(c) for c in casts], WORLD())
    for cast, x, of_all in zip(casts, mine, every, strict=True):
        for other in everyone(x):
            equal(x, other)
        flat = [t.flatten() for t in of_all]
        width = -(-len(flat[0]) // ranks)
        for d in range(ranks):
            part = slice(d * width, (d + 1) * width)
            if cast.name == "fp32":
                torch.testing.assert_close(x.flatten()[part], sum(flat)[part])
            else:
                equal(x.flatten()[part], by_hand(flat, cast, d)[part])
    return {"sent": dict(traffic.sent), "calls": dict(traffic.calls)}


def learned(steps):
    """The factor of pre-scaling over steps in which every rank has the same large gradient."""
    cast = make_cast({"cast": "e4m3", "power_of_two": True, "prescale": True})
    wire = WireFormat(cast, PreScale())
    x = torch.full((64,), 448.0)
    history = []
    for _ in range(steps):
        wire.prescale.end_step()
        mu = 2.0 ** math.floor(math.log2(float(wire.prescale.tensors["mu"])))
        y = x.clone()
        all_reduce([y], [wire], WORLD())
        equal(y, by_hand([x] * dist.get_world_size(), cast, 0, mu))
        history.append([mu, float(wire.prescale.tensors["overflowed"]), float(y[0])])
    return history


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((16,), 0.5))  # FSDP lays it after the children's
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, width), torch.nn.Linear(width, 16, bias=False)

    def forward(self, x):
        return self.gain * x + self.down(self.up(self.norm(x)).relu())


def model(recipe, odd=False):
    """Two blocks; `odd` = rows that no number of ranks divides."""
    torch.manual_seed(0)
    return ng.convert(torch.nn.Sequential(*(Block(13 if odd else 24) for _ in range(2))), recipe)


def is_narrow(name):
    return name.endswith(("up.weight", "down.weight"))


def batch(rank, rows=8):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rank))


def own_gradients(recipe, odd):
    """Every parameter's gradient on every rank alone, by name."""
    alone = model(recipe, odd)
    alone(batch(dist.get_rank())).square().sum().backward()
    return {name: everyone(p.grad) for name, p in alone.named_parameters()}


def sharded(reduce, odd=False):
    """FSDP with the narrow reduction: every shard is the oracle's, rows dealt out as FSDP does."""
    recipe = ng.recipe("bf16").with_places({"reduce": reduce, "gather": "fp32"})
    expected = own_gradients(recipe, odd)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net = model(recipe, odd)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    for module in [net, *net]:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    quantize_fsdp_reduce(net)
    with CommCounter() as traffic:
        net(batch(rank)).square().sum().backward()
    for name, p in net.named_parameters():
        grads = expected[name]
        prescale = getattr(net.get_submodule(name.rpartition(".")[0]), "reduce_prescale", None)
        mu = 1.0 if prescale is None else 2.0 ** math.floor(math.log2(prescale.tensors["mu"]))
        rows = -(-len(grads[0]) // ranks)
        mine = slice(rank * rows, (rank + 1) * rows)
        local = p.grad.to_local()
        if is_narrow(name):
            equal(local, by_hand(grads, recipe.reduce, rank, mu)[mine])
            assert mu == (0.5 if prescale else 1)  # below 1 / sqrt(ranks)
        else:
            torch.testing.assert_close(local, sum(grads)[mine])
    return {"sent": dict(traffic.sent), "calls": dict(traffic.calls)}


def replicated(reduce):
    """DDP with the hook, the mean: all ranks alike, the oracle's."""
    recipe = ng.recipe("bf16").with_places({"reduce": reduce})
    expected = own_gradients(recipe, True)
    ranks = dist.get_world_size()
    net = model(recipe, True)
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, quantized_comm_hook(wire_formats(net), WORLD(), divisor=ranks))
    ddp(batch(dist.get_rank())).square().sum().backward()
    for name, p in net.named_parameters():
        for other in everyone(p.grad):
            equal(p.grad, other)
        flat = [g.flatten() for g in expected[name]]
        width = -(-len(flat[0]) // ranks)
        for d in range(ranks):
            part = slice(d * width, (d + 1) * width)
            if is_narrow(name):
                equal(p.grad.flatten()[part], by_hand(flat, recipe.reduce, d)[part] / ranks)
            else:
                torch.testing.assert_close(p.grad.flatten()[part], sum(flat)[part] / ranks)


def at_rest(grad, reduce):
    """Gradients at rest: what all ranks hold afterwards is the sum, in the same bytes."""
    grad, reduce = make_cast(grad), make_cast(reduce)
    shapes = [(6, 8), (5, 4)]
    mine = [GradientState(shape, grad) for shape in shapes]
    for g, x in zip(mine, gradients_of(shapes), strict=True):
        g.add(x, None)
    before = [everyone(g.read()) for g in mine]
    wires = [WireFormat(reduce, PreScale() if reduce.state.prescale else None) for _ in mine]
    with CommCounter() as traffic:
        all_reduce_gradient_states(mine, wires, WORLD())
    for g, of_all in zip(mine, before, strict=True):
        for tensor in g.tensors.values():
            for other in everyone(tensor):
                assert torch.equal(tensor, other)
        if g.prescale is not None:
            shares = everyone(g.prescale.tensors["overflowed"])
            assert all(bool(a == b) for a, b in pairwise(shares))
        flat = [t.flatten() for t in of_all]
        width = -(-len(flat[0]) // len(flat))
        for d in range(len(flat)):
            part = slice(d * width, (d + 1) * width)
            expected = by_hand(flat, reduce, d)[part]
            if grad.element == reduce.element:
                equal(g.read().flatten()[part], expected)
            else:
                spacing = 2.0**-(grad.element.mantissa_bits)
                torch.testing.assert_close(g.read().flatten()[part], expected, rtol=spacing, atol=1e-2)
    return {"sent": dict(traffic.sent), "elements": [math.prod(s) for s in shapes]}


def counted():
    """What `CommCounter` counts of torch's collectives."""
    ranks = dist.get_world_size()
    x = torch.zeros(12 * ranks)
    with CommCounter() as traffic:
        all_gather_rows(x, WORLD())
        reduce_scatter_rows(x.view(ranks, 12), WORLD())
        dist.all_reduce(x)
        dist.barrier()
    return [dict(traffic.sent), dict(traffic.calls)]


def in_pieces():
    """Two pieces of a weight, each summed by two ranks: one scale, one factor, that of the whole."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # ranks with the same piece
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # ranks with the same samples
    cast = make_cast({"cast": "e4m3", "prescale": True})
    wire = WireFormat(cast, PreScale(mu=0), (columns[rank % 2], rows[rank // 2]))
    (x,) = gradients_of([(6, 4)])
    every = everyone(x)
    all_reduce([x], [wire], rows[rank // 2])
    amax = max(float(t.abs().max()) for t in every)
    encode = fp32_scale(torch.tensor(amax), cast.element)[0] * 0.5
    mine = [t.flatten() for t in every[rank // 2 * 2 :][:2]]
    expected = torch.cat([by_hand(mine, cast, d, encode=encode)[12 * d :][:12] for d in range(2)])
    equal(x.flatten(), expected)
    return [float(t) for t in wire.prescale.tensors.values()]


def copied():
    """Shards and copies of them: the factors stay the same on all ranks, which have other samples."""
    recipe = {"cast": "e4m3", "prescale": True}
    net = model(ng.recipe("bf16").with_places({"reduce": recipe, "gather": "fp32"}))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net, mesh=mesh)
    net.set_gradient_divide_factor(1.0)
    net.set_force_sum_reduction_for_comms(True)
    quantize_fsdp_reduce(net)
    for step in range(3):
        for block in net:
            for layer in (block.up, block.down):
                layer.reduce_prescale.tensors["mu"].mul_(16)  # until much does not fit
        net(batch(10 * dist.get_rank() + step)).square().sum().backward()
    factors = [layer.reduce_prescale.tensors for b in net for layer in (b.up, b.down)]
    return [[float(t["mu"]), float(t["overflowed"])] for t in factors]


def left_out():
    """A parameter that takes no part in the loss."""
    net = model(ng.recipe("bf16").with_places({"reduce": "e4m3", "gather": "fp32"}))
    net[0].forward = lambda x: x + net[0].up(x)[:, :16]
    fully_shard(net)
    quantize_fsdp_reduce(net)
    try:
        net(batch(0)).square().sum().backward()
    except UserError as error:
        return str(error)

"""What ranks do in the tests of collectives, gathers and reductions, whose oracle gathers all and loops."""

import math
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed.comm.byte_counter import CommCounter
from narrowgauge.distributed.comm.grad_hooks import (
    all_reduce_gradient_states,
    quantize_fsdp_reduce,
    quantized_comm_hook,
    wire_formats,
)
from narrowgauge.distributed.comm.quantized_reduce import all_reduce, reduce_scatter
from narrowgauge.distributed.comm.shared_scales import WireFormat
from narrowgauge.distributed.fsdp import quantized_fsdp, renew_gather_scales
from narrowgauge.formats import decode, round_to
from narrowgauge.kernels.cast import amaxes_of
from narrowgauge.nn import set_step
from narrowgauge.nn.linear import Linear
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import (
    GradientState,
    PreScale,
    QuantContext,
    gradient_of,
    make_cast,
    quantize_in_context,
    state_of,
)
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.system.collectives import (
    all_gather_rows,
    all_reduce_flat,
    all_reduce_max,
    all_reduce_max_,
    all_reduce_values,
    broadcast_object,
    gather_objects,
    reduce_scatter_rows,
)
from narrowgauge.system.errors import UserError

D = 16
WORLD = lambda: dist.group.WORLD  # noqa: E731
NARROW = ("up.weight", "down.weight")


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


def parts_of(flat, count):
    """(rank, elements) of the equal parts of a flat tensor that ranks sum up."""
    width = -(-len(flat) // count)
    return [(d, slice(d * width, (d + 1) * width)) for d in range(count)]


def collectives():
    """All that ranks agree on, numbers and objects; what is sent."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def tensors_of(r):  # the second one is empty on odd ranks
        generator = torch.Generator().manual_seed(r)
        return [torch.randn(5, 3, generator=generator), torch.randn(0 if r % 2 else 4, generator=generator)]

    with CommCounter() as counter:
        each = all_reduce_max(amaxes_of(tensors_of(rank)), [WORLD()])
    of_all = [tensors_of(r) for r in range(world)]
    expected = [torch.cat([t[i].flatten() for t in of_all]).abs().amax() for i in range(2)]
    poison = [math.nan, math.inf, -math.inf]
    bad = [torch.tensor([1.0, value if rank == world - 1 else 2.0]) for value in poison]
    alone = all_reduce_max(amaxes_of([torch.tensor([math.nan, 1]), torch.tensor([-math.inf])]), [])
    first = max(world - 2, 0)
    some = dist.new_group(list(range(first, world)))
    flags = [torch.tensor(float(rank)), torch.tensor(-1.0 if rank else 0.0)]
    all_reduce_max_(flags, WORLD())
    all_reduce_max_([], WORLD())
    sums = [torch.tensor([[1.0, 2.0]]), torch.tensor([3.0]), torch.tensor(4.0)]
    with counter:
        all_reduce_flat(sums, WORLD())
        all_reduce_flat([], WORLD())
    return {
        "calls": dict(counter.calls),
        "amaxes are those of all": torch.equal(each, torch.stack(expected)),
        "not finite": all_reduce_max(amaxes_of(bad), [WORLD()]).tolist(),
        "alone": [str(x) for x in alone.tolist()],
        "sums": all_reduce_values([rank, 1 / 3], [None], "cpu", torch.float64),
        "integers": all_reduce_values([2**53 + 1], [WORLD()], "cpu", torch.int64),
        "largest": [flag.item() for flag in flags],
        "gathered": gather_objects({"rank": rank, "list": [rank] * rank}, WORLD()),
        "broadcast": broadcast_object({"from": rank}, WORLD()),
        "last": broadcast_object(f"from {rank}", some) if rank >= first else f"from {first}",
        "flat": [t.tolist() for t in sums],
    }


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


def like_the_whole(recipe, places=None, width=24, reshard=True, copies=1, transposed=False):
    """Two steps on the same samples everywhere: outputs, gradients and weights equal one process's."""
    recipe = ng.recipe(recipe).with_places(places or {})
    ranks = dist.get_world_size() // copies
    rank = dist.get_rank() % ranks
    alone, ours = model(recipe, width, transposed), cut(model(recipe, width, transposed), reshard, copies)
    sent, calls = [], []
    for step in (1, 2):
        outputs = []
        for net in (alone, ours):
            set_step(net, 7, step, 0)
            with CommCounter() as traffic:
                y = net(batch(step))
                y.square().sum().backward()
            outputs.append(y.detach())
        equal(outputs[1], outputs[0], f"outputs of step {step}")
        sent.append(dict(traffic.sent))
        calls.append(dict(traffic.calls))
        for name, p in ours.named_parameters():
            grad, theirs = gradient_of(p), gradient_of(alone.get_parameter(name))
            expected = dist.get_world_size() * rows_of(theirs, ranks, rank)  # the sum of n equal ones
            near = {}
            if (kept := state_of(p).gradient) is not None:
                near = {"rtol": 2 * 2.0**-kept.cast.element.mantissa_bits, "atol": 0.05}
            grad = grad.to_local() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(grad, expected, **near)
        for net in (alone, ours):
            update(net)
        for name, p in ours.named_parameters():
            theirs = here(alone.get_parameter(name))
            equal(here(p), rows_of(theirs, ranks, rank), f"{name} after step {step}")
        with CommCounter() as traffic:
            renew_gather_scales(ours)
    return {"sent": sent, "calls": calls, "renewed": [dict(traffic.sent), dict(traffic.calls)]}


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
    """The kinds of the weights in a forward pass, whether all memory is given back after it, and records.

    The record of a weight's places is with the shard, not with what is gathered.
    """
    net, seen = cut(model(recipe)), []
    net[0].up.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    before = {name: state_of(p) for name, p in net.named_parameters()}
    y = net(batch(0))
    (weight,) = seen
    memory = weight.numbers.untyped_storage().size()
    y.square().sum().backward()
    for name, layer in net.named_modules():
        if isinstance(layer, Linear):
            state = state_of(layer.weight)
            assert state is before[f"{name}.weight"]
            assert state.shard.local_shape == layer.weight.to_local().shape
            assert state.shard.shape == layer.weight.shape
            assert layer.state_at_rest in (None, state)
            assert all(kept.shape == state.shard.local_shape for kept in state.by_place().values())
    return {
        "gathered": isinstance(weight, GatheredWeight) and "narrowgauge" not in vars(weight),
        "looks": [str(weight.dtype), str(weight.numbers.dtype), repr(weight)[:24]],
        "memory": memory,
        "kept": sorted(state.by_place()),
    }


def accumulated(recipe, copies=1):
    """Different micro-batches on every rank; copies of shards hold the same bytes."""
    net = cut(model(recipe), copies=copies)
    for number in range(3):
        set_step(net, 7, 1, 8 * dist.get_rank())
        net(batch(10 * dist.get_rank() + number)).square().sum().backward()
    shards = dist.get_world_size() // copies
    for p in net.parameters():
        stored = state_of(p).gradient
        assert stored is None or p.grad is None
        for tensor in [p.grad.to_local()] if stored is None else stored.tensors.values():
            every = everyone(tensor)
            for rank, other in enumerate(every):
                equal(other, every[rank % shards], "copies of a shard")


def poisoned(recipe, value):
    """One element of one shard is not finite: matmuls report it on all ranks, as with the whole weight."""
    net = cut(model(recipe))
    if dist.get_rank() == 0:
        with torch.no_grad():
            net[0].up.weight.to_local()[0, 0] = value
    return int(net(batch(0)).isfinite().sum())


def without_tokens(recipe):
    y = cut(model(recipe))(batch(0)[:0])
    y.sum().backward()
    return list(y.shape)


def by_hand(tensors, cast, destination, mu=1.0, encode=None):
    """The sum of the ranks' tensors as the ring of `destination` rounds it."""
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
        encode = fp32_scale(torch.tensor(amax), cast.element, cast.power_of_two)[0] * mu
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


def scattered(casts, poison=None):
    """A buffer as FSDP lays it, against the oracle; what was sent."""
    casts = [make_cast(c) for c in casts]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    widths = [7 * (i + 1) for i in range(len(casts))]
    columns = gradients_of([(ranks, w) for w in widths])
    if poison is not None and rank == 0:
        columns[0][ranks - 1, 3] = poison
    with CommCounter() as traffic:
        found = reduce_scatter(torch.cat(columns, 1), widths, [WireFormat(c) for c in casts], WORLD())
    for cast, part, column in zip(casts, found.split(widths), columns, strict=True):
        every = everyone(column)
        if cast.name == "fp32":
            torch.testing.assert_close(part, sum(every)[rank])
        else:
            equal(part, by_hand(every, cast, rank)[rank])
    return {"sent": dict(traffic.sent), "calls": dict(traffic.calls), "widths": widths}


def assert_is_sum(found, every, cast, divisor=1):
    """A tensor that is reduced everywhere: the same on all ranks, and of each part what its rank sums up."""
    for other in everyone(found):
        equal(found, other)
    found, flat = found.flatten(), [t.flatten() for t in every]
    for d, part in parts_of(flat[0], len(flat)):
        if cast.name == "fp32":
            torch.testing.assert_close(found[part], sum(flat)[part] / divisor)
        else:
            equal(found[part], by_hand(flat, cast, d)[part] / divisor)


def reduced_everywhere(casts):
    """A list of tensors of odd sizes."""
    casts = [make_cast(c) for c in casts]
    mine = gradients_of([(5, 3), (11,), (4, 4)][: len(casts)])
    every = [everyone(x) for x in mine]
    with CommCounter() as traffic:
        all_reduce(mine, [WireFormat(c) for c in casts], WORLD())
    for cast, x, of_all in zip(casts, mine, every, strict=True):
        assert_is_sum(x, of_all, cast)
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


def own_gradients(recipe, width):
    """Every parameter's gradient on every rank alone, by name."""
    alone = model(recipe, width)
    alone(batch(dist.get_rank())).square().sum().backward()
    return {name: everyone(p.grad) for name, p in alone.named_parameters()}


def sharded(reduce, width=24, averages=False):
    """FSDP with the narrow reduction: every shard is the oracle's, rows dealt out as FSDP does."""
    recipe = ng.recipe("bf16").with_places({"reduce": reduce, "gather": "fp32"})
    expected = own_gradients(recipe, width)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net = cut(model(recipe, width), averages=averages)
    with CommCounter() as traffic:
        net(batch(rank)).square().sum().backward()
    for name, p in net.named_parameters():
        prescale = getattr(net.get_submodule(name.rpartition(".")[0]), "reduce_prescale", None)
        mu = 1.0 if prescale is None else 2.0 ** math.floor(math.log2(prescale.tensors["mu"]))
        local, divisor = p.grad.to_local(), ranks if averages else 1
        if name.endswith(NARROW):
            whole = by_hand(expected[name], recipe.reduce, rank, mu)
            equal(local, rows_of(whole, ranks, rank) / divisor)
            assert mu == (0.5 if prescale else 1)  # below 1 / sqrt(ranks)
        else:
            torch.testing.assert_close(local, rows_of(sum(expected[name]), ranks, rank) / divisor)
    return {"sent": dict(traffic.sent), "calls": dict(traffic.calls)}


def replicated(reduce):
    """DDP with the hook, the mean: all ranks alike, the oracle's."""
    recipe = ng.recipe("bf16").with_places({"reduce": reduce})
    expected = own_gradients(recipe, 13)
    net = model(recipe, 13)
    ddp, ranks = DistributedDataParallel(net), dist.get_world_size()
    ddp.register_comm_hook(None, quantized_comm_hook(wire_formats(net), WORLD(), divisor=ranks))
    ddp(batch(dist.get_rank())).square().sum().backward()
    for name, p in net.named_parameters():
        cast = recipe.reduce if name.endswith(NARROW) else make_cast({"cast": "fp32"})
        assert_is_sum(p.grad, expected[name], cast, ranks)


def at_rest(grad, reduce):
    """Gradients at rest: what all ranks hold afterwards is the sum, in the same bytes."""
    grad, reduce = make_cast(grad), make_cast(reduce)
    shapes = [(6, 8), (5, 4)]
    mine = [GradientState(shape, grad) for shape in shapes]
    for g, x in zip(mine, gradients_of(shapes), strict=True):
        g.add(x, None)
    before = [everyone(g.read()) for g in mine]
    wires = [WireFormat(reduce, PreScale() if reduce.prescale else None) for _ in mine]
    with CommCounter() as traffic:
        all_reduce_gradient_states(mine, wires, WORLD())
    for g, of_all in zip(mine, before, strict=True):
        for tensor in g.tensors.values():
            assert all(torch.equal(tensor, other) for other in everyone(tensor))
        if g.prescale is not None:
            shares = everyone(g.prescale.tensors["overflowed"])
            assert all(bool(a == b) for a, b in pairwise(shares))
        if grad.element == reduce.element:
            assert_is_sum(g.read(), of_all, reduce)
            continue
        flat = [t.flatten() for t in of_all]
        for d, part in parts_of(flat[0], len(flat)):
            spacing = 2.0**-grad.element.mantissa_bits
            expected = by_hand(flat, reduce, d)[part]
            torch.testing.assert_close(g.read().flatten()[part], expected, rtol=spacing, atol=1e-2)
    return {"sent": dict(traffic.sent), "elements": [math.prod(s) for s in shapes]}


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
    places = {"reduce": {"cast": "e4m3", "prescale": True}, "gather": "fp32"}
    net = model(ng.recipe("bf16").with_places(places))
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    net.set_gradient_divide_factor(1.0)
    net.set_force_sum_reduction_for_comms(True)
    quantize_fsdp_reduce(net)
    layers = [layer for block in net for layer in (block.up, block.down)]
    for step in range(3):
        for layer in layers:
            layer.reduce_prescale.tensors["mu"].mul_(16)  # until much does not fit
        net(batch(10 * dist.get_rank() + step)).square().sum().backward()
    return [[float(layer.reduce_prescale.tensors[k]) for k in ("mu", "overflowed")] for layer in layers]


def left_out():
    """The refusal of a parameter that takes no part in the loss."""
    net = model(ng.recipe("bf16").with_places({"reduce": "e4m3", "gather": "fp32"}))
    net[0].forward = lambda x: x + net[0].up(x)[:, :D]
    fully_shard(net)
    quantize_fsdp_reduce(net)
    try:
        net(batch(0)).square().sum().backward()
    except UserError as error:
        return str(error)

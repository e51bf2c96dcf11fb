"""Gradients on the wire: every number against an oracle that gathers all and loops, every byte counted."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from distributed.ranks import on_ranks
from distributed.small_model import D, batch, cut, equal, everyone, model, rows_of
from narrowgauge.distributed.byte_counter import CommCounter
from narrowgauge.distributed.fsdp import quantize_fsdp_reduce
from narrowgauge.distributed.quantized_reduce import (
    WireFormat,
    all_reduce,
    all_reduce_gradient_states,
    quantized_comm_hook,
    reduce_scatter,
    ring_sum,
    wire_formats,
)
from narrowgauge.formats import decode, encode, round_to
from narrowgauge.formats import format as format_named
from narrowgauge.quantization import GradientState, PreScale, QuantContext, make_cast, quantize_in_context
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.system.errors import UserError

NARROW = ("up.weight", "down.weight")
POWERS = {"cast": "e4m3", "power_of_two": True}
LEARNING = {**POWERS, "prescale": True}


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_every_pair_of_codes_adds_up_like_numbers(name):
    element = format_named(name)
    codes = torch.arange(256, dtype=torch.uint8)
    a, b = codes.repeat_interleave(256), codes.repeat(256)
    sums, cut = ring_sum(torch.stack([a, b]), 1, element, counts=True)  # rank 1 begins with rank 0's
    exact = decode(a, element).double() + decode(b, element).double()
    beyond = exact.float().abs() > element.max
    finite = exact.isfinite()
    expected = round_to(exact, element)
    assert torch.equal(decode(sums, element)[finite].double(), expected[finite])
    assert torch.equal(cut.bool()[finite], beyond[finite])
    assert decode(sums, element)[exact.isnan()].isnan().all()


def test_the_order_is_the_rings():
    """1 + 1/16 is a tie of E4M3 and rounds down to even; 1/16 + 1/16 added before it is not lost."""
    element = format_named("e4m3")
    parts = encode(torch.tensor([[1.0], [1 / 16], [1 / 16]]), element)
    found = [float(decode(ring_sum(parts, rank, element)[0], element)) for rank in range(3)]
    assert found == [1.125, 1.0, 1.0]  # begun by rank 1, 2, 0


def test_fp16_overflows_to_infinity_and_codes_saturate():
    parts = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)
    assert ring_sum(parts, 0, format_named("fp16"))[0].isinf()
    parts = encode(torch.tensor([[-400.0], [-400.0]]), format_named("e4m3"))
    assert decode(ring_sum(parts, 0, format_named("e4m3"))[0], format_named("e4m3")) == -448


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
    """A buffer as FSDP lays it, against the oracle; (the columns of each cast, what was sent)."""
    casts = [make_cast(c) for c in casts]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    widths = [7 * (i + 1) for i in range(len(casts))]
    columns = gradients_of([(ranks, w) for w in widths])
    if poison is not None and rank == 0:
        columns[0][ranks - 1, 3] = poison
    with CommCounter() as traffic:
        wires = [WireFormat(c) for c in casts]
        found = reduce_scatter(torch.cat(columns, 1), widths, wires, dist.group.WORLD)
    for cast, part, column in zip(casts, found.split(widths), columns, strict=True):
        every = everyone(column)
        if cast.name == "fp32":
            torch.testing.assert_close(part, sum(every)[rank])
        else:
            equal(part, by_hand(every, cast, rank)[rank])
    return widths, traffic


@pytest.mark.tier("thorough", keep=(3,))
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_a_scattered_bucket():
    casts = ["e4m3", "fp32", "e5m2", "bf16", POWERS, "fp16", "fp32"]
    widths, traffic = scattered(casts)
    size = {"fp32": 4, "bf16": 2, "fp16": 2}
    # one byte an element of each e4m3 and e5m2, to each of the others
    each = sum(size.get(str(c), 1) * w for c, w in zip(casts, widths, strict=True))
    assert traffic.sent["reduce"] == (dist.get_world_size() - 1) * each
    assert traffic.calls == {"amax": 1, "reduce": 2}


@pytest.mark.parametrize(("cast", "poison"), [("e4m3", math.inf), ("e5m2", math.nan)])
@on_ranks(2)
def test_what_is_not_finite_anywhere_is_nan_everywhere(cast, poison):
    scattered([cast], poison)


def assert_is_sum(found, every, cast, **tolerance):
    """A tensor that is reduced everywhere: the same on all ranks, and of each part what its rank sums up."""
    for other in everyone(found):
        equal(found, other)
    found, flat, width = found.flatten(), [t.flatten() for t in every], -(-found.numel() // len(every))
    for d in range(len(flat)):
        part = slice(d * width, (d + 1) * width)
        expected = (sum(flat) if cast.name == "fp32" else by_hand(flat, cast, d))[part]
        if cast.name == "fp32" or tolerance:
            torch.testing.assert_close(found[part], expected, **tolerance)
        else:
            equal(found[part], expected)


#: Of each number of ranks: the sums of steps in which all have one large gradient, and how many overflow.
#: The factor then leaves room; 1344 lies between 1280 and 1408.
LEARNED = {2: ([448, 896, 896], 1), 3: ([448, 896, 1280, 1280], 2)}


@pytest.mark.parametrize("world", LEARNED)
@on_ranks()
def test_the_factor_learns_how_many_ranks_there_are():
    totals, overflows = LEARNED[dist.get_world_size()]
    cast, x = make_cast(LEARNING), torch.full((64,), 448.0)
    wire = WireFormat(cast, PreScale())
    for step, total in enumerate(totals):
        wire.prescale.end_step()
        mu = 2.0 ** math.floor(math.log2(float(wire.prescale.tensors["mu"])))
        y = all_reduce([x], [wire], dist.group.WORLD)[0].values()
        equal(y, by_hand([x] * dist.get_world_size(), cast, 0, mu))
        assert float(y[0]) == total
        assert (float(wire.prescale.tensors["overflowed"]) > 0) == (step < overflows)


def own_gradients(recipe, width):
    """Every parameter's gradient on every rank alone, by name."""
    alone = model(recipe, width)
    alone(batch(dist.get_rank())).square().sum().backward()
    return {name: everyone(p.grad) for name, p in alone.named_parameters()}


FSDP = [
    (2, "e4m3", {"averages": True}),
    (3, LEARNING, {"width": 13}),
    (3, "e4m3", {"width": 13}),
    (2, "bf16", {}),
]


@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize(("world", "reduce", "how"), FSDP, ids=str)
@on_ranks()
def test_fsdp(reduce, how):
    """Sums, and the averages of a custom loop: every shard is the oracle's, rows dealt out as FSDP does."""
    recipe = ng.recipe("bf16").with_places({"reduce": reduce, "gather": "fp32"})
    ranks, rank, width = dist.get_world_size(), dist.get_rank(), how.get("width", 24)
    expected = own_gradients(recipe, width)
    net = cut(model(recipe, width), averages="averages" in how)
    with CommCounter() as traffic:
        net(batch(rank)).square().sum().backward()
    for name, p in net.named_parameters():
        prescale = getattr(net.get_submodule(name.rpartition(".")[0]), "reduce_prescale", None)
        mu = 1.0 if prescale is None else 2.0 ** math.floor(math.log2(prescale.tensors["mu"]))
        local, divisor = p.grad.to_local(), ranks if "averages" in how else 1
        if name.endswith(NARROW):
            whole = by_hand(expected[name], recipe["reduce"], rank, mu)
            equal(local, rows_of(whole, ranks, rank) / divisor)
            assert mu == (0.5 if prescale else 1)  # below 1 / sqrt(ranks)
        else:
            torch.testing.assert_close(local, rows_of(sum(expected[name]), ranks, rank) / divisor)
    rows = [-(-width // ranks) * 16, -(-16 // ranks) * width]  # of a shard: up and down
    wide = [-(-16 // ranks)] * 3 + [-(-width // ranks)]  # norm, gain and bias
    size = 2 if reduce == "bf16" else 1
    assert traffic.sent["reduce"] == 2 * (ranks - 1) * (size * sum(rows) + 4 * sum(wide))


@pytest.mark.tier("thorough", keep=("e4m3",))
@pytest.mark.parametrize("reduce", ["e4m3", "bf16", "fp32"])
@on_ranks(2)
def test_ddp(reduce):
    """With the hook, the sum: all ranks alike, the oracle's."""
    recipe = ng.recipe("bf16").with_places({"reduce": reduce})
    expected = own_gradients(recipe, 13)
    net = model(recipe, 13)
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, quantized_comm_hook(wire_formats(net), dist.group.WORLD))
    ddp(batch(dist.get_rank())).square().sum().backward()
    for name, p in net.named_parameters():
        cast = recipe["reduce"] if name.endswith(NARROW) else make_cast({"cast": "fp32"})
        assert_is_sum(p.grad, expected[name], cast)


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize(("grad", "reduce"), [(LEARNING, LEARNING), ("bf16", "e4m3"), ("bf16", "bf16")])
@on_ranks(3)
def test_gradients_at_rest(grad, reduce):
    """What all ranks hold afterwards is the sum, in the same bytes."""
    grad, reduce = make_cast(grad), make_cast(reduce)
    shapes = [(6, 8), (5, 4)]
    mine = [GradientState(shape, grad) for shape in shapes]
    for g, x in zip(mine, gradients_of(shapes), strict=True):
        g.add(x, None)
    before = [everyone(g.read()) for g in mine]
    wires = [WireFormat(reduce, PreScale() if reduce.prescale else None) for _ in mine]
    with CommCounter() as traffic:
        all_reduce_gradient_states(mine, wires, dist.group.WORLD)
    for g, of_all in zip(mine, before, strict=True):
        factors = () if g.prescale is None else (g.prescale.tensors["overflowed"],)
        for tensor in (*g.tensors.values(), *factors):
            assert all(torch.equal(tensor, other) for other in everyone(tensor))
        spacing = 2.0**-grad.element.mantissa_bits
        is_same = grad.element == reduce.element
        assert_is_sum(g.read(), of_all, reduce, **({} if is_same else {"rtol": spacing, "atol": 1e-2}))
    padded = [math.prod(s) + -math.prod(s) % 3 for s in shapes]
    size = 2 if reduce.name == "bf16" else 1
    assert traffic.sent["reduce"] == 2 * 2 * size * sum(padded) // 3


@on_ranks(4)
def test_a_weight_in_pieces_has_one_scale():
    """Two pieces of a weight, each summed by two ranks: one scale, one factor, that of the whole."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # ranks with the same piece
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # ranks with the same samples
    cast = make_cast({"cast": "e4m3", "prescale": True})
    wire = WireFormat(cast, PreScale(mu=0), (columns[rank % 2], rows[rank // 2]))
    (x,) = gradients_of([(6, 4)])
    every = everyone(x)
    x = all_reduce([x], [wire], rows[rank // 2])[0].values()
    amax = max(float(t.abs().max()) for t in every)
    encode_scale = fp32_scale(torch.tensor(amax), cast.element)[0] * 0.5
    mine = [t.flatten() for t in every[rank // 2 * 2 :][:2]]
    parts = [by_hand(mine, cast, d, encode=encode_scale)[12 * d :][:12] for d in range(2)]
    equal(x.flatten(), torch.cat(parts))
    for factor in wire.prescale.tensors.values():
        assert all(torch.equal(factor, other) for other in everyone(factor))


@on_ranks(4)
def test_factors_are_the_same_on_copies_of_shards():
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
    for layer in layers:
        for factor in layer.reduce_prescale.tensors.values():
            assert all(torch.equal(factor, other) for other in everyone(factor))
        assert layer.reduce_prescale.tensors["overflowed"] > 0


@on_ranks(2)
def test_a_parameter_without_a_gradient_is_named():
    net = model(ng.recipe("bf16").with_places({"reduce": "e4m3", "gather": "fp32"}))
    net[0].forward = lambda x: x + net[0].up(x)[:, :D]
    fully_shard(net)
    quantize_fsdp_reduce(net)
    with pytest.raises(UserError, match="some parameter of the module took no part in the loss; freeze it"):
        net(batch(0)).square().sum().backward()

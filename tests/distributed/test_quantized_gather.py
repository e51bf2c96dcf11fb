"""Weights on the wire: cut by FSDP and gathered in low precision, a model computes as if it were whole."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from distributed.ranks import on_ranks
from distributed.small_model import D, batch, cut, equal, model, rows_of
from narrowgauge.distributed.byte_counter import CommCounter
from narrowgauge.distributed.fsdp import renew_gather_scales
from narrowgauge.nn import set_step
from narrowgauge.quantization import gradient_of, state_of

SIZES = {"fp8": 1, "fp8-fnuz": 1, "msamp-o3": 1, "mxfp8": 4}  # else 2
WIDE = {"reduce": "fp32"}  # sums are compared with one process's


def bytes_of_a_gather(width, size):
    """What a rank sends of one block: rows are dealt out evenly, the last ranks' filled up."""
    world = dist.get_world_size()
    weights = [-(-width // world) * D, -(-D // world) * width]
    others = 3 * -(-D // world) + -(-width // world)  # norm, gain and bias
    return (world - 1) * (size * sum(weights) + 4 * others)


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


def like_the_whole(recipe, places=None, width=24, reshard=True, copies=1, transposed=False):
    """Two steps on the same samples everywhere: outputs, gradients and weights equal one process's.

    Returns what each pass has sent.
    """
    recipe = ng.recipe(recipe).with_places(places or {})
    ranks = dist.get_world_size() // copies
    rank = dist.get_rank() % ranks
    alone, ours = model(recipe, width, transposed), cut(model(recipe, width, transposed), reshard, copies)
    passes = []
    for step in (1, 2):
        outputs = []
        for net in (alone, ours):
            set_step(net, 7, step, 0)
            with CommCounter() as traffic:
                y = net(batch(step))
                y.square().sum().backward()
            outputs.append(y.detach())
        equal(outputs[1], outputs[0], f"outputs of step {step}")
        passes.append(traffic)
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
        renew_gather_scales(ours)
    return passes


#: Processes, recipe, how; a gather's bytes are counted where weights are cut again.
CASES = [
    (2, "fp8", {"places": WIDE}),
    (2, "fp8", {"reshard": False}),
    (2, "msamp-o2", {"places": WIDE, "transposed": True}),
    (3, "msamp-o3", {"places": WIDE, "width": 13}),
    (3, "msamp-o3", {"places": WIDE, "width": 2}),  # the last rank has no row
    (4, "msamp-o3", {"places": WIDE, "copies": 2}),
    (2, "bf16-sr", {"places": WIDE}),
    (2, "fp8", {"places": {"gather": "fp32"}}),
    (2, "coat", {"places": {"grad": {"cast": "bf16", "rounding": "stochastic"}}}),
    (4, "fp8", {"width": 13}),  # the last rank has one row
    (2, "msamp-o3", {"places": {**WIDE, "gather": "fp32"}}),
    (2, "fp8", {"places": {"grad": "e4m3"}}),
    (2, "msamp-o1", {"places": WIDE, "reshard": False}),
    *[(2, name, {"places": WIDE}) for name in ("fp8-fnuz", "bf16", "fp16", "mxfp8")],
    *[(3, name, {"places": WIDE, "width": 13}) for name in ("fp8", "bf16-sr", "msamp-o2")],
]


@pytest.mark.tier("thorough", keep=2, nightly=9)
@pytest.mark.parametrize(("world", "recipe", "how"), CASES, ids=str)
@on_ranks()
def test_ranks_compute_as_one(recipe, how):
    """Outputs, gradients and weights of two steps; every byte of a gather."""
    for traffic in like_the_whole(recipe, **how):
        if how.get("places") == WIDE and "copies" not in how and "transposed" not in how:
            times = 2 if "reshard" in how else 4  # two blocks, gathered forward and, if cut, backward
            size = bytes_of_a_gather(how.get("width", 24), SIZES.get(recipe, 2))
            assert (traffic.sent["gather"], traffic.calls["gather"]) == (times * size, times)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@on_ranks(2)
def test_what_is_not_finite_arrives_as_that(value):
    """One element of one shard: matmuls report it on all ranks, as with the whole weight."""
    net = cut(model("fp8"))
    if dist.get_rank() == 0:
        with torch.no_grad():
            net[0].up.weight.to_local()[0, 0] = value
    assert not net(batch(0)).isfinite().any()

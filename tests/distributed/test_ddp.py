"""Torch's DDP around a converted model, prepared or not: replicas stay the same, and bits are their own."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from distributed.loops import batch, cut, everything, gathered, net, optimizer_of, same_everywhere
from distributed.ranks import on_ranks
from narrowgauge.nn import Linear, recipe_tensors


@pytest.mark.tier("thorough", keep=("msamp-o3",), nightly=("msamp-o3", "eco"))
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2", "msamp-o3", "eco"])
@on_ranks(2)
def test_collectives_see_values_and_leave_the_same_bits_everywhere(name):
    """A sum, an average and a broadcast of a weight equal its values'."""
    torch.manual_seed(dist.get_rank())
    layer = ng.convert(nn.Sequential(nn.Linear(32, 16)), name, keep=[])[0]
    own = layer.weight.detach().clone()
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, layer.weight.detach())
    assert torch.equal(every[dist.get_rank()], own)
    dist.all_reduce(layer.weight.data, async_op=True).wait()
    error, sizes = layer.weight.detach() - sum(every), sum(w.abs() for w in every)
    # E4M3 rounds by 2^-4: each value from its master, whose sum is sent, and the sum.
    assert (error.abs() <= 2.2 * 2**-4 * sizes + 2**-8 * sizes.max()).all()
    assert same_everywhere(recipe_tensors(layer) | {"w": layer.weight.detach().clone()})
    with torch.no_grad():
        layer.weight.copy_(own)
    dist.broadcast(layer.weight.data, 1)
    assert torch.equal(layer.weight.detach().clone(), every[1])
    assert same_everywhere(recipe_tensors(layer) | {"w": layer.weight.detach().clone()})


@pytest.mark.tier("thorough", keep=("False-msamp-o3",), nightly=("False-msamp-o3", "True-fp8-delayed"))
@pytest.mark.parametrize("name", ["msamp-o3", "fp8-delayed", "coat", "nvfp4", "bf16-sr", "eco"])
@pytest.mark.parametrize("is_prepared", [False, True])
@on_ranks(2)
def test_replicas_stay_equal_whatever_a_loop_does(name, is_prepared):
    """It looks and evaluates on rank 0 alone.

    A prepared model has other samples on each rank, and checkpoints of the older kind.
    """
    model = net(name, seed=dist.get_rank())
    ddp = DistributedDataParallel(ng.prepare_ddp(model) if is_prepared else model)
    inner, optimizer = model[1].forward, optimizer_of(model, name)
    rank = dist.get_rank() if is_prepared else 0
    if is_prepared:
        model[1].forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True)
    elif dist.get_rank() == 0:
        with torch.no_grad():
            ddp.eval()(batch(0))
    ddp.train()
    for step in range(1, 4):
        ng.set_step(model, 0, step, 8 * rank)
        with ddp.no_sync():
            ddp(batch(step, rank)).square().mean().backward()
        if dist.get_rank() == 0:
            assert model[0][1].weight.grad.isfinite().all()
        ddp(batch(step + 10, rank)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(everything(model))


def keeping(seen, name):
    """An observer of a layer that keeps the numbers of each operand."""
    keep = lambda o: seen.update({f"{name}.{o.place}": o.values.float()})  # noqa: E731
    return SimpleNamespace(operand=keep, product=lambda *_: None)


@pytest.mark.tier("thorough", keep=("unprepared ddp-None",))
@pytest.mark.parametrize("samples", [None, 8, 0])
@pytest.mark.parametrize("wrapper", ["ddp", "unprepared ddp", "fsdp"])
@on_ranks(2)
def test_ranks_draw_bits_of_their_own(wrapper, samples):
    """In a second pass of the same inputs and weights, only random bits are left to differ.

    Those of a weight and of signs are the first process's, though it has made a pass alone. The loop sets no
    step, or `samples` times the rank as the first sample.
    """
    model = net("quartet")
    if "ddp" in wrapper:
        trained = DistributedDataParallel(ng.prepare_ddp(model) if wrapper == "ddp" else model)
        quiet = trained.no_sync
    else:
        trained, quiet = cut(model), nullcontext
    trained(batch(0, rank=0)).square().mean().backward()  # DDP sends buffers after the first pass
    if wrapper == "unprepared ddp" and dist.get_rank() == 0:
        model(batch(0))  # alone, so that its next keys are others: all shall draw from these
    if samples is not None:
        ng.set_step(model, 0, 1, samples * dist.get_rank())
    seen = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            layer.observer = keeping(seen, name)
    with quiet():
        trained(batch(0, rank=0)).square().mean().backward()
    found = gathered({place: t.tolist() for place, t in seen.items()})
    same = {place: all(other[place] == found[0][place] for other in found) for place in found[0]}
    if samples == 0:
        assert all(same.values()), "a loop that says which samples a pass has decides the bits"
        return
    assert not same["1.3.wgrad.dy"], "the ranks drew the same bits for an output gradient"
    assert not same["1.3.wgrad.x"], "the ranks drew the same bits for an input"
    assert same["1.3.fprop.x"], "signs of a transform are the same on all ranks"
    assert all(is_same for place, is_same in same.items() if place.endswith(".w"))


class Branches(nn.Module):
    """Three layers, of which a pass may leave out the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, uses_second):
        x = self.first(x)
        return self.third(self.second(x) if uses_second else x)


UNPREPARED = [
    ("bf16-sr", True, True),
    ("msamp-o3", True, False),
    ("nvfp4", False, False),
    ("msamp-o1", False, True),
    ("msamp-o2", False, False),
    ("coat", False, False),
]


@pytest.mark.tier("thorough", keep=1, nightly=4)
@pytest.mark.parametrize(("name", "in_buckets", "finds_unused"), UNPREPARED)
@on_ranks(2)
def test_ddp_of_a_model_that_nobody_prepared(name, in_buckets, finds_unused):
    """From different weights, over micro-batches, with hooks and layers that some passes leave out.

    Replicas are the same, masters included, and have the mean of the sums that each rank has alone.
    """
    torch.manual_seed(dist.get_rank())
    model = ng.convert(Branches(), name, keep=[])
    ddp = DistributedDataParallel(
        model, find_unused_parameters=finds_unused, gradient_as_bucket_view=in_buckets
    )
    seen = []
    optimizer = optimizer_of(model, name)
    for step in range(1, 5):
        users = {2: (0,), 3: ()}.get(step, (0, 1)) if finds_unused else (0, 1)
        alone = copy.deepcopy(model)
        handle = model.second.weight.register_hook(lambda g: seen.append(g.dtype) or 2 * g)
        alone.second.weight.register_hook(lambda g: 2 * g)
        for part in range(2):
            x, used = batch(10 * step + part), dist.get_rank() in users
            for m, quiet in ((alone, nullcontext), (ddp, ddp.no_sync if part == 0 else nullcontext)):
                ng.set_step(m, 0, step, 8 * part)
                with quiet():
                    m(x, used).square().mean().backward()
        handle.remove()
        before = model.second.weight.detach().clone()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            mean = torch.zeros_like(q) if q.grad is None else q.grad / 2
            dist.all_reduce(mean)
            assert torch.equal(torch.zeros_like(q) if p.grad is None else p.grad, mean)
        optimizer.step()
        optimizer.zero_grad()
        assert users or torch.equal(before, model.second.weight), "an unused layer stands still"
    masters = {name: t for name, t in recipe_tensors(model).items() if "master" in name}
    assert bool(masters) == (name == "msamp-o3")
    assert same_everywhere(model.state_dict() | masters)
    assert len(seen) == (4 + 2 * (dist.get_rank() == 0) if finds_unused else 8)

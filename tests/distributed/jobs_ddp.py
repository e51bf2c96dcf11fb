"""What ranks do in the tests of torch's DDP around a converted model; steps that FSDP2's jobs take too."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.nn import Linear, recipe_tensors
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed import Engine, MicroBatch, ModelSpec, parallelize
from narrowgauge.trainer.distributed.parallel.parallelize import Objective
from narrowgauge.trainer.models import Transformer, model_config, starting_values

CPU = torch.device("cpu")
STEPS, SAMPLES = 3, 2


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


def everything(model, norms=()):
    moved = {f"norm {i}": norm for i, norm in enumerate(norms)} | model.state_dict() | recipe_tensors(model)
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
        norm = (
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if torchs_clip
            else optimizer.clip_grad_norm_(0.5)
        )
        norms.append(whole(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def tokens(step, part, vocabulary=64):
    """One micro-batch of this rank."""
    seed = 100 * step + 10 * part + dist.get_rank()
    x = torch.randint(vocabulary, (SAMPLES, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), SAMPLES * 16)


def config():
    sizes = {"dim": 64, "layers": 1, "heads": 2, "ffn_dim": 64, "vocab_size": 64, "max_sequence_length": 16}
    return model_config("debug", **sizes)


def by_the_package(recipe):
    """All that moves, after steps of two micro-batches as `narrowgauge train` takes them."""
    mesh = Mesh(ParallelDims(replicate=dist.get_world_size()), CPU)
    model, modules = parallelize(ModelSpec(config(), ng.recipe(recipe), seed=1), mesh, CPU)
    engine = Engine(model, mesh, CPU, modules)
    optimizer = ng.AdamW(model.parameters(), recipe, lr=1e-2, seed=1)
    engine.attach(optimizer)
    norms = []
    for step in range(1, STEPS + 1):
        parts = [MicroBatch(first(part), tokens(step, part), 1 / 4) for part in range(2)]
        engine.accumulate(
            parts, lambda i, step=step: ng.set_step(model, 1, step, first(i)), lambda loss: loss
        )
        engine.finish_backward()
        norms.append(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
        engine.after_update()
    return everything(model, norms)


def first(part):
    """The index in the step's batch of a micro-batch's first sequence."""
    return (2 * dist.get_rank() + part) * SAMPLES


def by_ddp(recipe):
    """The same in a custom loop."""
    model = Transformer(config(), torch.bfloat16)
    values = starting_values(config(), {n: p.shape for n, p in model.named_parameters()}, 1 + dist.get_rank())
    with torch.no_grad():
        for name, value in values:
            model.get_parameter(name).copy_(value)
    objective = ng.prepare_ddp(Objective(ng.convert(model, recipe)))
    ddp = DistributedDataParallel(objective)
    optimizer = ng.AdamW(model.parameters(), recipe, lr=1e-2, seed=1)
    norms = []
    for step in range(1, STEPS + 1):
        for part in range(2):
            ng.set_step(model, 1, step, first(part))
            with ddp.no_sync() if part == 0 else nullcontext():
                x, y = tokens(step, part)
                (ddp(x, y) / 2).backward()
        norms.append(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, norms)


def like_the_package(recipe):
    """The names of what differs, and whether the replicas are the same."""
    theirs = by_ddp(recipe)
    return {"differ": unlike(by_the_package(recipe), theirs), "same": same_everywhere(theirs)}


def ddp_with_eyes(recipe):
    """A narrow gradient is read between micro-batches, on one rank; checkpoints of the older kind."""
    model = ng.prepare_ddp(net(recipe, seed=dist.get_rank()))
    inner = model[1].forward
    model[1].forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True)
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(model, recipe)
    for step in range(1, 4):
        ng.set_step(model, 0, step, 8 * dist.get_rank())
        with ddp.no_sync():
            ddp(batch(step)).square().mean().backward()
        if dist.get_rank() == 0:
            assert model[0][1].weight.grad.isfinite().all()
        ddp(batch(step + 10)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return same_everywhere(everything(model))


def bits_of_ranks(recipe, wrapper, samples=None):
    """Gradients of each rank alone in its second pass, all of the same inputs and weights.

    The loop sets no step, or `samples` times the rank as the first sample. Gradients can differ by their
    random bits only. Returns whether each gradient is the same on all ranks.
    """
    model = net(recipe)
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
            layer.observer = Operands(seen, name)
    with quiet():
        trained(batch(0, rank=0)).square().mean().backward()
    found = gathered({place: t.tolist() for place, t in seen.items()})
    return {place: all(other[place] == found[0][place] for other in found) for place in found[0]}


class Operands:
    """Keeps the numbers of each operand."""

    def __init__(self, seen, name):
        self.seen, self.name = seen, name

    def operand(self, observed):
        self.seen[f"{self.name}.{observed.place}"] = observed.seen.float()

    def product(self, *_):
        """Nothing."""


def evaluated_by_one(recipe):
    """DDP around an unprepared model that rank 0 evaluates first: whether the replicas are the same."""
    model = net(recipe, seed=dist.get_rank())
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            ddp.eval()(batch(0))
    steps(ddp.train(), optimizer_of(model, recipe), (1, 2))
    return same_everywhere(everything(model))


def plain_ddp_resumed(recipe):
    """The names of what differs between an unprepared model under DDP and one process, after a resume.

    Only process 0 keeps the weights that were saved. A step has one micro-batch: DDP leaves the sum of
    several in float32.
    """
    saved = net(recipe)
    its_optimizer = optimizer_of(saved, recipe)
    steps(saved, its_optimizer, (1, 2))
    state = copy.deepcopy(ng.state_dict(saved, its_optimizer))
    steps(saved, its_optimizer, (3, 4), parts=1)
    model = net(recipe, seed=3)
    optimizer = optimizer_of(model, recipe)
    ng.load_state_dict(model, optimizer, state)
    if dist.get_rank():
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p))
    ddp = DistributedDataParallel(model)
    steps(ddp, optimizer, (3, 4), parts=1)
    return unlike(everything(model), everything(saved))


class Branches(nn.Module):
    """Three layers, of which a pass may leave out the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, uses_second):
        x = self.first(x)
        return self.third(self.second(x) if uses_second else x)


def unprepared(recipe, finds_unused, in_buckets):
    """DDP around an unprepared model: two micro-batches a step, hooks, layers that are left out.

    Ranks start from different weights. Returns whether replicas are the same, masters included; whether an
    unused layer stood still; whether gradients are the means of those that a copy of the model has on each
    rank alone, bit for bit; and what a hook saw.
    """
    torch.manual_seed(dist.get_rank())
    model = ng.convert(Branches(), recipe, keep=[])
    ddp = DistributedDataParallel(
        model, find_unused_parameters=finds_unused, gradient_as_bucket_view=in_buckets
    )
    seen, exact, still = [], True, True
    optimizer = optimizer_of(model, recipe)
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
            exact = exact and torch.equal(torch.zeros_like(q) if p.grad is None else p.grad, mean)
        optimizer.step()
        optimizer.zero_grad()
        still = still and (bool(users) or torch.equal(before, model.second.weight))
    masters = {name: t for name, t in recipe_tensors(model).items() if "master" in name}
    assert bool(masters) == (recipe == "msamp-o3")
    return [same_everywhere(model.state_dict() | masters), still, exact, len(seen)]


def collectives_of_weights(recipe):
    """Whether a sum, an average and a broadcast of a weight equal its values', on all ranks."""
    torch.manual_seed(dist.get_rank())
    layer = ng.convert(nn.Sequential(nn.Linear(32, 16)), recipe, keep=[])[0]
    own, found = layer.weight.detach().clone(), []
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, layer.weight.detach())
    found.append(torch.equal(every[dist.get_rank()], own))
    dist.all_reduce(layer.weight.data, async_op=True).wait()
    error, sizes = layer.weight.detach() - sum(every), sum(w.abs() for w in every)
    # E4M3 rounds by 2^-4: each value from its master, whose sum is sent, and the sum.
    found.append(bool((error.abs() <= 2.2 * 2**-4 * sizes + 2**-8 * sizes.max()).all()))
    found.append(same_everywhere(recipe_tensors(layer) | {"w": layer.weight.detach().clone()}))
    with torch.no_grad():
        layer.weight.copy_(own)
    dist.broadcast(layer.weight.data, 1)
    found.append(torch.equal(layer.weight.detach().clone(), every[1]))
    found.append(same_everywhere(recipe_tensors(layer) | {"w": layer.weight.detach().clone()}))
    return found

"""What ranks do in the tests of experts that lie on different processes."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist

import narrowgauge as ng
from narrowgauge.data import open_data
from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.distributed.parallel.expert_parallel import divide_experts
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import set_step
from narrowgauge.quantization import local_tensor
from narrowgauge.runs.loop.parallel_dims import parallel_dims_of
from narrowgauge.training.config.config import make_config
from narrowgauge.training.step.trainer import Trainer

CPU = torch.device("cpu")
SIZES = {"dim": 64, "layers": 1, "heads": 2, "ffn_dim": 64, "vocab_size": 100, "experts": 6}
STOCHASTIC = {"cast": "e4m3", "rounding": "stochastic"}


def layer(recipe, unused):
    """What differs, to the bit, between the experts of this rank and of one process with all tokens.

    No token goes to the expert `unused`.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    model = Transformer(model_config("debug", **SIZES))
    initialize(model, 0)
    with torch.no_grad():
        model.blocks[0].experts.router.weight[unused] = -100.0
    narrow = ng.recipe(recipe).with_places({"dgrad.dy": STOCHASTIC, "wgrad.dy": STOCHASTIC})
    one = ng.convert(model, narrow).blocks[0].experts
    several = copy.deepcopy(model)
    divide_experts(several, Mesh(ParallelDims(shard=count, expert=count), CPU), batch_size=count)
    divided = several.blocks[0].experts
    x_BTD = torch.rand(count, 9, 64, generator=torch.Generator().manual_seed(1))
    dy_BTD = torch.randn(count, 9, 64, generator=torch.Generator().manual_seed(2))
    alone = gradients(model, one, 0, x_BTD, dy_BTD)
    ours = gradients(several, divided, rank, x_BTD[rank : rank + 1], dy_BTD[rank : rank + 1])
    for name in ("y", "dx"):
        alone[name] = alone[name][rank : rank + 1]
    ours.pop("router.weight")  # the sum over processes is FSDP's
    with torch.no_grad():  # then an expert without tokens also computes
        divided(x_BTD[rank : rank + 1])
    return [name for name, t in ours.items() if not torch.equal(t, alone[name])], sorted(ours)


def gradients(model, experts, first, x_BTD, dy_BTD):
    set_step(model, 0, 1, first)
    x_BTD = x_BTD.clone().requires_grad_()
    # dx without the router's part, a product of other shape, whose last bits may differ
    experts.router.register_forward_pre_hook(lambda _, inputs: inputs[0].detach())
    y_BTD = experts(x_BTD)
    y_BTD.backward(dy_BTD)
    named = {name: p.grad for name, p in experts.named_parameters()}
    return {"y": y_BTD.detach(), "dx": x_BTD.grad, **named}


def goes_on(values, path, start, steps=2):
    """Restore (or begin, without a start), save in between: losses, and the bits of the state."""
    config = make_config(values)
    d = config.data
    data = open_data(d.source, d.tokenizer, d.weights, lambda *_: None)
    mesh = Mesh(parallel_dims_of(config, dist.get_world_size()), CPU)
    trainer = Trainer.begin(config.plan, CPU, mesh)
    if start:
        trainer.restore(Path(start), dist.group.WORLD)
        restored = trainer.save(Path(path) / "restored", "me", dist.group.WORLD)
    with trainer.batches(data.train) as batches:
        told = [trainer.train_step(batches) for _ in range(steps)]
    trainer.check_replicas()
    saved = trainer.save(Path(path), "me", dist.group.WORLD)
    sizes = {name: list(local_tensor(p).shape) for name, p in trainer.model.named_parameters()}
    return {"steps": told, "saved": str(saved), "restored": str(restored) if start else "", "sizes": sizes}

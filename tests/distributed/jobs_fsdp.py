"""What ranks do in the tests of torch's FSDP2 around a converted model, and of its narrow sharded weights."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs_ddp import cut, net, optimizer_of, same_everywhere, steps, unlike, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.nn import recipe_tensors
from narrowgauge.quantization import NarrowTensor
from narrowgauge.system.errors import UserError
from nn import idioms
from nn.idioms_of_writing import WRITES

#: Gradients as FSDP2 keeps them. Two equal ones have the same sum in float32 as once, so one process computes
#: the same digits.
WIDE = {"reduce": "fp32", "grad": "fp32"}


def weights(model):
    return {name: whole(t).clone() for name, t in model.state_dict().items()}


def plain(seed=0):
    """65 rows, which two ranks divide into 33 and 32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 65), nn.GELU(), nn.Linear(65, 32))


def narrow(recipe, seed=0):
    return ng.convert(plain(seed), ng.recipe(recipe).with_places(WIDE), keep=[])


def odd(recipe, seed=0):
    """131 rows, which two ranks divide into 66 and 65; large enough for narrow moments.

    It has no bias of 131 elements: torch rounds the last few of a vector in another way.
    """
    torch.manual_seed(seed)
    layers = (
        nn.Sequential(nn.Linear(32, 131, bias=False), nn.GELU()),
        nn.Sequential(nn.Linear(131, 32), nn.LayerNorm(32)),
    )
    return ng.convert(nn.Sequential(*layers), ng.recipe(recipe).with_places(WIDE), keep=[])


def sharded(recipe, by="narrowgauge", torchs_clip=False, device="cpu"):
    """The largest difference of weights and norms to one process alone, in units of the learning rate.

    The refusal where there is one. From the meta device each rank fills in its rows.
    """
    recipe = ng.recipe(recipe).with_places({"reduce": "fp32"})
    alone = net(recipe.with_places({"grad": "fp32"}))
    start = {name: t.clone() for name, t in alone.state_dict().items()}
    expected = steps(alone, optimizer_of(alone, recipe), (1, 2), torchs_clip)
    try:
        model = cut(net(recipe, device=device), ng.fully_shard if by == "narrowgauge" else fully_shard)
    except UserError as error:
        return str(error)
    if device == "meta":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.to_local().copy_(start[name].chunk(dist.get_world_size())[dist.get_rank()])
    norms = steps(model, optimizer_of(model, recipe), (1, 2), torchs_clip)
    ours, theirs = weights(model), weights(alone)
    apart = max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    return {"norms": [norms, expected], "apart": apart / 1e-2}


def saved(recipe, folder):
    """FSDP2, saved by `torch.distributed.checkpoint` and by `ng.state_dict`, and trained on."""
    model = cut(odd(recipe))
    optimizer = optimizer_of(model, ng.recipe(recipe).with_places(WIDE))
    steps(model, optimizer, (1, 2))
    its_weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": its_weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    torch.save(ng.state_dict(model, optimizer), f"{folder}/ours-{dist.get_rank()}.pt")
    steps(model, optimizer, (3, 4))
    torch.save(weights(model), f"{folder}/expected-{dist.get_rank()}.pt")


def resumed(recipe, folder, by, is_sharded=True):
    """The weights that differ, after another model, with another past, has gone on.

    `by` is "torch", "torch, through rank 0" or "narrowgauge".
    """
    model = odd(recipe, seed=3)
    model = cut(model) if is_sharded else model
    optimizer = optimizer_of(model, ng.recipe(recipe).with_places(WIDE))
    steps(model, optimizer, (7,))
    if by == "narrowgauge":
        path = f"{folder}/ours-{dist.get_rank()}.pt"
        ng.load_state_dict(model, optimizer, torch.load(path, weights_only=False))
    else:
        its_weights, state = get_state_dict(model, optimizer)
        found = {"model": its_weights, "optimizer": state}
        dcp.load(found, checkpoint_id=f"{folder}/checkpoint")
        set_model_state_dict(model, found["model"])
        state, options = found["optimizer"], StateDictOptions()
        if by != "torch":
            set_optimizer_state_dict(model, optimizer, state)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            of_all = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True)
            )
            state = of_all if dist.get_rank() == 0 else {}
        set_optimizer_state_dict(model, optimizer, state, options=options)
    steps(model, optimizer, (3, 4))
    return unlike(weights(model), torch.load(f"{folder}/expected-0.pt", weights_only=True))


def scales_of_several_rows():
    """The sentence with which a state that no DTensor describes is refused."""
    recipe = ng.recipe("bf16").with_places({**WIDE, "m": "fp8-128x128"})
    model = cut(ng.convert(nn.Sequential(nn.Sequential(nn.Linear(32, 256))), recipe))
    with pytest.raises(UserError) as raised:
        optimizer_of(model, recipe).state_dict()
    return str(raised.value)


def page(blocks):
    """The page's program: the first block is the model and the loop."""
    names = {}
    torch.manual_seed(dist.get_rank())
    for block in blocks:
        exec(block, names)
    return [same_everywhere(names["prepared"].state_dict()), same_everywhere(weights(names["sharded"]))]


def results_of(idiom, model):
    """What an idiom returns, or how it is refused."""
    try:
        found = idiom(model)
    except UserError as error:
        return str(error)
    found = found if isinstance(found, list | tuple) else [found]
    return [whole(t).detach().float() for t in found]


def is_served(idiom):
    """Whether torch's FSDP2 of a plain model gives what the model gives."""
    try:
        found = results_of(idiom, cut(plain(), blocks=False))
    except Exception:  # DTensor refuses many operations, in many ways
        return False
    return agree(found, results_of(idiom, plain()))


def agree(found, expected):
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return len(found) == len(expected) and all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-6 * y.abs().max().item())
        for x, y in zip(found, expected, strict=True)
    )


def unlike_one_process(recipe):
    """The idioms that a plain model's FSDP2 serves and a narrow one's does not; and those it serves."""
    every = {**idioms.READS, **idioms.GRADIENTS, **WRITES}
    served = {name: idiom for name, idiom in every.items() if is_served(idiom)}
    unlike = []
    for name, idiom in served.items():
        found, expected = (
            results_of(idiom, cut(narrow(recipe), blocks=False)),
            results_of(idiom, narrow(recipe)),
        )
        if not agree(found, expected):
            unlike.append(name)
    return {"served": sorted(served), "unlike": unlike}


def shards(recipe):
    """The types of local tensors before and after FSDP2 makes all shards as long as the longest."""
    model = cut(narrow(recipe), blocks=False)
    local = [type(m.weight._local_tensor) is NarrowTensor for m in (model[0], model[2])]
    model(idioms.batch())
    model.load_state_dict(model.state_dict())
    local += [type(m.weight._local_tensor) is NarrowTensor for m in (model[0], model[2])]
    for t in (model[0].weight.detach(), model.state_dict()["0.weight"]):
        assert type(copy.deepcopy(t)._local_tensor) is torch.Tensor
        assert torch.equal(whole(copy.deepcopy(t)), narrow(recipe)[0].weight.detach())
    return [*local, len(model[0].weight._local_tensor)]


def broadcast_from_rank_0(recipe):
    """Whether a full state dict that only rank 0 has arrives at all, and goes back to one."""
    model, start = cut(narrow(recipe), blocks=False), narrow(recipe, seed=3).state_dict()
    given = {name: t.detach().clone() for name, t in start.items()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    arrived = all(torch.equal(t, start[name]) for name, t in weights(model).items())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    is_full = all(torch.equal(t, start[name]) for name, t in full.items())
    return [arrived, is_full and (len(full) == 4) == (dist.get_rank() == 0)]


def masters_after_loading(recipe, folder):
    """The masters that change when the weights that are there are loaded, by `load_state_dict` and DCP."""
    model = cut(narrow(recipe), blocks=False)
    steps(model, optimizer_of(model, recipe), (1, 2))
    before = {name: t.clone() for name, t in recipe_tensors(model).items()}
    assert recipe != "msamp-o3" or any("master" in name for name in before)
    model.load_state_dict(model.state_dict())
    saved = {"model": get_model_state_dict(model)}
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    return unlike(recipe_tensors(model), before)


def seen_by_the_next_pass(recipe):
    """Whether a pass right after a write, and after parameters were replaced, has the new weights."""
    alone, model, same = narrow(recipe), cut(narrow(recipe), blocks=False), []
    alone(idioms.batch()), model(idioms.batch())
    with torch.no_grad(), pytest.raises(UserError) as raised:
        model[0].weight.mul_(0.5)  # the full weight, which a root keeps
    model.reshard()
    for m in (alone, model):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(0.5)
    same.append(torch.equal(alone(idioms.batch()), model(idioms.batch())))
    model.reshard()
    for m in (alone, model):
        m.load_state_dict({name: 0.5 * t for name, t in m.state_dict().items()}, assign=True)
        with torch.no_grad():
            torch.nn.init.constant_(m[2].weight, 0.25)
    same.append(torch.equal(alone(idioms.batch()), model(idioms.batch())))
    return [*same, str(raised.value)]

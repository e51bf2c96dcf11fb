"""What ranks do in the tests of sharded narrow weights: idioms, state dicts, masters."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs_data_parallel import optimizer_of, steps, weights, whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import GELU, Linear, Sequential

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.nn import recipe_tensors
from narrowgauge.quantization import NarrowTensor
from nn import idioms
from nn.idioms_of_writing import WRITES

#: Gradients as FSDP2 keeps them, so that one process computes the same.
WIDE = {"reduce": "fp32", "grad": "fp32"}


def plain(seed=0):
    """65 rows, which two ranks divide into 33 and 32."""
    torch.manual_seed(seed)
    return Sequential(Linear(32, 65), GELU(), Linear(65, 32))


def narrow(recipe, seed=0):
    return ng.convert(plain(seed), ng.recipe(recipe).with_places(WIDE), keep=[])


def sharded(model):
    return ng.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


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
        found = results_of(idiom, sharded(plain()))
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
        found, expected = results_of(idiom, sharded(narrow(recipe))), results_of(idiom, narrow(recipe))
        if not agree(found, expected):
            unlike.append(name)
    return {"served": sorted(served), "unlike": unlike}


def shards(recipe):
    """The types of local tensors before and after FSDP2 makes all shards as long as the longest."""
    model = sharded(narrow(recipe))
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
    model, start = sharded(narrow(recipe)), narrow(recipe, seed=3).state_dict()
    given = {name: t.detach().clone() for name, t in start.items()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    arrived = all(torch.equal(t, start[name]) for name, t in weights(model).items())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    is_full = all(torch.equal(t, start[name]) for name, t in full.items())
    return [arrived, is_full and (len(full) == 4) == (dist.get_rank() == 0)]


def masters_after_loading(recipe, folder):
    """Whether masters survive the weights that the model has already, by `load_state_dict` and by DCP."""
    model = sharded(narrow(recipe))
    optimizer = optimizer_of(model, recipe)
    steps(model, optimizer, (1, 2))
    before = {name: t.clone() for name, t in recipe_tensors(model).items()}
    assert recipe != "msamp-o3" or any("master" in name for name in before)
    model.load_state_dict(model.state_dict())
    saved = {"model": get_model_state_dict(model)}
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    return all(torch.equal(t, before[name]) for name, t in recipe_tensors(model).items())


def seen_by_the_next_pass(recipe):
    """Whether a pass right after a write, and after parameters were replaced, has the new weights."""
    alone, model, same = narrow(recipe), sharded(narrow(recipe)), []
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

"""Torch's FSDP2 around a converted model: it trains as one process, resumes, and writes as any other model.

A narrow weight under FSDP2 is a DTensor of narrow tensors.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import narrowgauge as ng
from distributed.loops import cut, net, optimizer_of, same_everywhere, steps, unlike, whole
from distributed.ranks import on_ranks
from narrowgauge.system.errors import UserError
from nn import idioms
from nn.own_loop import NARROW, PAGE, is_on_page
from nn.own_loop import WIDE as OF_WIDE_WEIGHTS
from support.markdown import blocks

#: Gradients as FSDP2 keeps them. Two equal ones have the same sum in float32 as once, so one process computes
#: the same digits.
WIDE = {"reduce": "fp32", "grad": "fp32"}
RECIPES = ("msamp-o3", "bf16-sr", "msamp-o1", "msamp-o2", "eco")


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


#: Recipe and how: who shards, whose clip of gradients, where the model is made.
FSDP = [
    ("msamp-o3", {"by": "torch"}),
    ("nvfp4", {"device": "meta"}),
    ("msamp-o3", {"torchs_clip": True}),
    ("coat", {"by": "torch", "torchs_clip": True}),
    ("msamp-o3", {"device": "meta"}),
    ("bf16-sr", {}),
    ("fp8-delayed", {"torchs_clip": True}),
    *[(name, {}) for name in OF_WIDE_WEIGHTS],
    *[(name, {"by": "torch"}) for name in ("bf16-sr", "fp8-delayed", "nvfp4")],
]


@pytest.mark.tier("thorough", keep=2, nightly=7)
@pytest.mark.parametrize(("name", "how"), FSDP, ids=str)
@on_ranks(2)
def test_fsdp_trains_as_one_process_or_is_refused(name, how):
    """From the meta device each rank fills in its rows."""
    device, torchs_clip = how.get("device", "cpu"), how.get("torchs_clip", False)
    recipe = ng.recipe(name).with_places({"reduce": "fp32"})
    alone = net(recipe.with_places({"grad": "fp32"}))
    start = {key: t.clone() for key, t in alone.state_dict().items()}
    expected = steps(alone, optimizer_of(alone, recipe), (1, 2), torchs_clip)
    shard = fully_shard if "by" in how else ng.fully_shard
    if name in NARROW and ("by" in how or device == "meta"):
        with pytest.raises(UserError) as raised:
            cut(net(recipe, device=device), shard)
        assert is_on_page(str(raised.value))
        return
    model = cut(net(recipe, device=device), shard)
    if device == "meta":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.to_local().copy_(start[key].chunk(dist.get_world_size())[dist.get_rank()])
    norms = steps(model, optimizer_of(model, recipe), (1, 2), torchs_clip)
    assert norms == pytest.approx(expected, rel=1e-5)
    ours, theirs = weights(model), weights(alone)
    assert max((ours[key] - theirs[key]).abs().max().item() for key in theirs) < 0.05 * 1e-2


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


MORE = ("bf16-sr", "msamp-o1", "msamp-o2", "eco", "fp8-delayed", "nvfp4", "coat")


@pytest.mark.tier("thorough", nightly=("fp8-delayed", "msamp-o3"))
@pytest.mark.parametrize("name", ["msamp-o3", *MORE])
def test_a_checkpoint_resumes_fsdp_bit_for_bit_on_two_processes_and_on_one(ranks, name, tmp_path):
    """Both `torch.distributed.checkpoint` and `ng.state_dict` write one."""
    how = {"folder": str(tmp_path), "recipe": name}
    ranks(2, "test_fsdp.saved", **how)
    for by in ("torch", "torch, through rank 0", "narrowgauge"):
        assert ranks(2, "test_fsdp.resumed", by=by, **how) == [[], []]
    if name != "fp8-delayed":  # each process has a history
        for is_sharded in (True, False):
            assert ranks(1, "test_fsdp.resumed", by="torch", is_sharded=is_sharded, **how) == [[]]


@on_ranks(2)
def test_torchs_checkpoint_is_refused_scales_of_several_rows():
    """A state that no DTensor describes."""
    recipe = ng.recipe("bf16").with_places({**WIDE, "m": "fp8-128x128"})
    model = cut(ng.convert(nn.Sequential(nn.Sequential(nn.Linear(32, 256))), recipe))
    with pytest.raises(UserError, match="cannot divide scales of blocks of several rows among processes"):
        optimizer_of(model, recipe).state_dict()


@pytest.mark.tier("thorough")
@on_ranks(2)
def test_the_program_of_the_page():
    """Its first block is the model and the loop."""
    program, _, *of_two = blocks(PAGE, "python")
    names = {}
    torch.manual_seed(dist.get_rank())
    for block in (program, *of_two):
        exec(block, names)
    assert same_everywhere(names["prepared"].state_dict())
    assert same_everywhere(weights(names["sharded"]))


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


@pytest.mark.tier("thorough", nightly=1)  # short: the next two
@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_what_fsdp_serves_of_a_plain_model_it_serves_of_a_narrow_one(name):
    every = {**idioms.READS, **idioms.GRADIENTS, **idioms.WRITES}
    served = {key: idiom for key, idiom in every.items() if is_served(idiom)}
    for key, idiom in served.items():
        found, expected = (results_of(idiom, m) for m in (cut(narrow(name), blocks=False), narrow(name)))
        assert agree(found, expected), key
    assert {"set_to_zero", "write_through_a_state_dict"} <= set(served)
    assert len(served) >= 10


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.parametrize("name", ["msamp-o3", "bf16-sr", "msamp-o2"])
@on_ranks(2)
def test_the_next_pass_has_what_was_written(name):
    """Right after a write, and after parameters were replaced."""
    alone, model = narrow(name), cut(narrow(name), blocks=False)
    alone(idioms.batch()), model(idioms.batch())
    with torch.no_grad(), pytest.raises(UserError) as raised:
        model[0].weight.mul_(0.5)  # the full weight, which a root keeps
    assert is_on_page(str(raised.value)), "a write to the full weight"
    model.reshard()
    for m in (alone, model):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(0.5)
    assert torch.equal(alone(idioms.batch()), model(idioms.batch()))
    model.reshard()
    for m in (alone, model):
        m.load_state_dict({key: 0.5 * t for key, t in m.state_dict().items()}, assign=True)
        with torch.no_grad():
            torch.nn.init.constant_(m[2].weight, 0.25)
    assert torch.equal(alone(idioms.batch()), model(idioms.batch()))


@pytest.mark.tier("thorough", keep=1, nightly=("msamp-o3", "fp8"))
@pytest.mark.parametrize("name", [*RECIPES, "fp8"])
@on_ranks(2)
def test_a_full_state_dict_of_rank_0_arrives_and_goes_back(name):
    model, start = cut(narrow(name), blocks=False), narrow(name, seed=3).state_dict()
    given = {key: t.detach().clone() for key, t in start.items()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    assert all(torch.equal(t, start[key]) for key, t in weights(model).items())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert all(torch.equal(t, start[key]) for key, t in full.items())
    assert (len(full) == 4) == (dist.get_rank() == 0)


def test_offloading_by_torch_is_refused():
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "msamp-o2", keep=[])
    with pytest.raises(UserError, match="leave offload_policy out"):
        ng.fully_shard(model, offload_policy=CPUOffloadPolicy())

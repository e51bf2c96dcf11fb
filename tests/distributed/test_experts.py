"""Experts that lie on different processes: the numbers of one process, and checkpoints for any number."""

import copy
import json

import pytest
import torch
import torch.distributed as dist

import narrowgauge as ng
from distributed.ranks import on_ranks
from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.nn import set_step
from narrowgauge.trainer.checkpoint import load
from narrowgauge.trainer.distributed.parallel.layers import divide_experts
from narrowgauge.trainer.models import Transformer, initialize, model_config

CPU = torch.device("cpu")


def gradients(model, experts, first, x_BTD, dy_BTD):
    set_step(model, 0, 1, first)
    x_BTD = x_BTD.clone().requires_grad_()
    # dx without the router's part, a product of other shape, whose last bits may differ
    experts.router.register_forward_pre_hook(lambda _, inputs: inputs[0].detach())
    y_BTD = experts(x_BTD)
    y_BTD.backward(dy_BTD)
    named = {name: p.grad for name, p in experts.named_parameters()}
    return {"y": y_BTD.detach(), "dx": x_BTD.grad, **named}


@pytest.mark.tier("thorough", keep=("fp32", "mxfp8"))
@pytest.mark.parametrize("recipe", ["fp32", "fp8", "mxfp8"])
@on_ranks(2)
def test_an_expert_sees_the_matrix_of_one_process_with_all_tokens(recipe):
    """To the bit: scales, blocks along the tokens of two processes, random bits; an expert without any."""
    rank, count = dist.get_rank(), dist.get_world_size()
    sizes = {"dim": 64, "layers": 1, "heads": 2, "ffn_dim": 64, "vocab_size": 100, "experts": 6}
    model = Transformer(model_config("debug", **sizes))
    initialize(model, 0)
    with torch.no_grad():
        model.blocks[0].experts.router.weight[4] = -100.0
    stochastic = {"cast": "e4m3", "rounding": "stochastic"}
    narrow = ng.recipe(recipe).with_places({"dgrad.dy": stochastic, "wgrad.dy": stochastic})
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
    assert [name for name, t in ours.items() if not torch.equal(t, alone[name])] == []
    own = {"0", "1", "2"} if rank == 0 else {"3", "4", "5"}
    assert {name.split(".")[0] for name in ours} == {"y", "dx"} | own


MOVED = {"model", "optimizer"}  # to begin a step takes the amax of the last one into the histories


def same(path, other):
    """The groups of two checkpoints that hold the same bits."""
    one, two = (load(p).tensors for p in (path, other))
    assert one.keys() == two.keys()
    assert all(one[g].keys() == two[g].keys() for g in one)
    return {g for g in one if all(torch.equal(t, two[g][name]) for name, t in one[g].items())}


@pytest.mark.tier("thorough", nightly=1)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "msamp-o2"])
def test_a_checkpoint_is_resumed_to_the_bit_and_by_one_process(ranks, text, tmp_path, recipe):
    values = {
        "model": {"name": "debug", "dim": 64, "ffn_dim": 64, "layers": 2, "vocab_size": 320, "experts": 4},
        "data": {"source": text, "tokenizer": "bytes", "sequence_length": 32},
        "training": {"batch_size": 4, "micro_batch_size": 1, "steps": 8},
        "recipe": {"name": recipe},
    }
    divided = values | {"parallel": {"shard": 2, "expert": 2}}

    def go(world, values, name, start="", steps=2):
        how = {"values": values, "path": str(tmp_path / name), "start": start, "steps": steps}
        told = ranks(world, "jobs_training.goes_on", **how)
        assert len({json.dumps([each["steps"], each["saved"]]) for each in told}) == 1
        return told

    first, second = go(2, divided, "first")
    expert = "blocks.1.experts.{}.down.weight"
    assert first["sizes"][expert.format(1)] == second["sizes"][expert.format(3)] == [64, 64]
    assert expert.format(2) not in first["sizes"]
    undisturbed = go(2, divided, "undisturbed", steps=4)[0]
    on = go(2, divided, "on", first["saved"])[0]
    assert first["steps"] + on["steps"] == undisturbed["steps"]
    assert same(on["saved"], undisturbed["saved"]) == set(load(on["saved"]).tensors)
    alone = go(1, values, "alone", first["saved"])[0]
    assert same(alone["restored"], first["saved"]) >= MOVED
    assert alone["steps"][0][0] == pytest.approx(on["steps"][0][0], rel=1e-3)
    back = go(2, divided, "back", alone["saved"])[0]
    assert same(back["restored"], alone["saved"]) >= MOVED

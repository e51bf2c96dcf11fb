"""Experts that lie on different processes: the numbers of one process, and checkpoints for any number."""

import json

import pytest
import torch

from narrowgauge.trainer.checkpoint import load


@pytest.mark.tier("thorough", keep=("fp32", "mxfp8"))
@pytest.mark.parametrize("recipe", ["fp32", "fp8", "mxfp8"])
def test_an_expert_sees_the_matrix_of_one_process_with_all_tokens(ranks, recipe):
    """To the bit: scales, blocks along the tokens of two processes, random bits; an expert without any."""
    everyone = ranks(2, "jobs_training.layer_of_experts", recipe=recipe, unused=4)
    assert [unlike for unlike, _ in everyone] == [[], []]
    held = [{name.split(".")[0] for name in names} for _, names in everyone]
    assert held == [{"y", "dx", "0", "1", "2"}, {"y", "dx", "3", "4", "5"}]


MOVED = {"model", "optimizer"}  # to begin a step takes the amax of the last one into the histories


def same(path, other):
    """The groups of two checkpoints that hold the same bits."""
    one, two = (load(p).tensors for p in (path, other))
    assert one.keys() == two.keys()
    assert all(one[g].keys() == two[g].keys() for g in one)
    return {g for g in one if all(torch.equal(t, two[g][name]) for name, t in one[g].items())}


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
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

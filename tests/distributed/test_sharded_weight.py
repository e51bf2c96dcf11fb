"""A narrow weight under FSDP2 is a DTensor of narrow tensors: code reads and writes it as any other."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import narrowgauge as ng
from narrowgauge.system.errors import UserError
from nn.own_loop import is_on_page

RECIPES = ("msamp-o3", "bf16-sr", "msamp-o1", "msamp-o2", "eco")


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")  # short: the next three
@pytest.mark.parametrize("name", RECIPES)
def test_what_fsdp_serves_of_a_plain_model_it_serves_of_a_narrow_one(ranks, name):
    for found in ranks(2, "jobs_fsdp.unlike_one_process", recipe=name):
        assert found["unlike"] == []
        assert {"set_to_zero", "initialize_constant", "write_through_a_state_dict"} <= set(found["served"])
        assert len(found["served"]) >= 20


def test_shards_stay_narrow_whatever_their_length(ranks):
    first, second = ranks(2, "jobs_fsdp.shards", recipe="msamp-o3")
    assert [first, second] == [[True] * 4 + [33], [True] * 4 + [32]]


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.parametrize("name", ["msamp-o3", "bf16-sr", "msamp-o2"])
def test_the_next_pass_has_what_was_written(ranks, name):
    for *same, sentence in ranks(2, "jobs_fsdp.seen_by_the_next_pass", recipe=name):
        assert same == [True, True]
        assert is_on_page(sentence), "a write to the full weight"


@pytest.mark.tier("nightly", keep=("msamp-o3", "fp8"))
@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize("name", [*RECIPES, "fp8"])
def test_a_full_state_dict_of_rank_0_arrives_and_goes_back(ranks, name):
    assert ranks(2, "jobs_fsdp.broadcast_from_rank_0", recipe=name) == [[True] * 2] * 2


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["msamp-o3", "msamp-o2"])
def test_masters_survive_weights_that_the_model_has_already(ranks, name, tmp_path):
    assert ranks(2, "jobs_fsdp.masters_after_loading", recipe=name, folder=str(tmp_path)) == [[], []]


def test_offloading_by_torch_is_refused():
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "msamp-o2", keep=[])
    with pytest.raises(UserError, match="leave offload_policy out"):
        ng.fully_shard(model, offload_policy=CPUOffloadPolicy())

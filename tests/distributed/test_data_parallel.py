"""Torch's DDP and FSDP2 around a converted model: they train as the package does, or say why not."""

from functools import partial

import pytest

from nn.own_loop import NARROW, PAGE, WIDE, is_on_page
from support.markdown import blocks

EVERY = [*WIDE, *NARROW]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "nvfp4"])
def test_ddp_of_a_prepared_model_trains_as_the_package(ranks, name):
    """Bit for bit: weights, masters, scales and norms, though the ranks start from different weights."""
    for found in ranks(2, "jobs_data_parallel.like_the_package", recipe=name):
        assert found == {"differ": [], "same": True}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2", "msamp-o3", "eco"])
def test_collectives_see_values_and_leave_the_same_bits_everywhere(ranks, name):
    assert ranks(2, "jobs_data_parallel.collectives_of_weights", recipe=name) == [[True] * 5] * 2


@pytest.mark.tier("thorough", keep=("fp8-delayed", "msamp-o3"))
@pytest.mark.parametrize("name", ["fp8-delayed", "coat", *NARROW])
def test_replicas_stay_equal_whatever_a_loop_does(ranks, name):
    assert ranks(2, "jobs_data_parallel.ddp_with_eyes", recipe=name) == [True, True]


@pytest.mark.tier("thorough", keep=("ddp", "unprepared ddp"))
@pytest.mark.parametrize("wrapper", ["ddp", "unprepared ddp", "fsdp"])
def test_ranks_draw_bits_of_their_own(ranks, wrapper):
    """The last layer's output gradient is the same everywhere, and so are weights: only bits are left."""
    for samples in (None, 8):
        for found in ranks(
            2, "jobs_data_parallel.bits_of_ranks", recipe="quartet", wrapper=wrapper, samples=samples
        ):
            assert not found["1.3.wgrad.dy"], "the ranks drew the same bits for an output gradient"
            assert not found["1.3.wgrad.x"], "the ranks drew the same bits for an input"
            assert found["1.3.fprop.x"], "signs of a transform are the same on all ranks"
            assert all(same for place, same in found.items() if place.endswith(".w"))
    for found in ranks(2, "jobs_data_parallel.bits_of_ranks", recipe="quartet", wrapper=wrapper, samples=0):
        assert all(found.values()), "a loop that says which samples a pass has decides the bits"


@pytest.mark.tier("thorough", keep=("nvfp4", "msamp-o3"))
@pytest.mark.parametrize("name", EVERY)
def test_ddp_of_a_model_that_nobody_prepared(ranks, name):
    """The replicas are the same, masters included, though the ranks start from different weights."""
    assert ranks(2, "jobs_data_parallel.plain_ddp", recipe=name) == [True, True]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["msamp-o2", "msamp-o3"])
def test_ddp_of_a_resumed_model_that_nobody_prepared_trains_as_one_process(ranks, name):
    """To the bit, masters included: the ranks see the same samples, so that means are exact."""
    assert ranks(2, "jobs_data_parallel.plain_ddp_resumed", recipe=name) == [[], []]


@pytest.mark.tier("thorough", keep=("bf16-sr-buckets-find",))
@pytest.mark.parametrize("finds_unused", [False, True], ids=["all", "find"])
@pytest.mark.parametrize("in_buckets", [False, True], ids=["copies", "buckets"])
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3"])
def test_ddp_sums_narrow_gradients_of_layers_that_some_passes_leave_out(
    ranks, name, in_buckets, finds_unused
):
    """Over micro-batches, and with hooks: the mean of the sums that each rank has in the recipe's format."""
    job = "jobs_data_parallel.unprepared"
    for rank, found in enumerate(
        ranks(2, job, recipe=name, finds_unused=finds_unused, in_buckets=in_buckets)
    ):
        *is_right, hooked = found
        assert is_right == [True, True, True]
        assert hooked == (8 if not finds_unused else 4 + 2 * (rank == 0))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("torchs_clip", [True, False], ids=["clip of torch's", "ours"])
def test_fsdp_trains_as_one_process(ranks, name, torchs_clip):
    for found in ranks(2, "jobs_data_parallel.sharded", recipe=name, torchs_clip=torchs_clip):
        ours, alone = found["norms"]
        assert ours == pytest.approx(alone, rel=1e-5)
        assert found["apart"] < 0.05


@pytest.mark.tier("thorough", keep=("coat", "msamp-o3"))
@pytest.mark.parametrize("name", EVERY)
def test_fsdp_of_torchs_own(ranks, name):
    for found in ranks(2, "jobs_data_parallel.sharded", recipe=name, by="torch"):
        if name in NARROW:
            assert is_on_page(found)
        else:
            ours, alone = found["norms"]
            assert ours == pytest.approx(alone, rel=1e-5)
            assert found["apart"] < 0.05


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["fp8-delayed", "coat", "msamp-o3"])
def test_fsdp_is_resumed_bit_for_bit(ranks, name):
    assert ranks(2, "jobs_data_parallel.resumed", recipe=name) == [True, True]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4", "coat", *NARROW, "eco"])
def test_torchs_checkpoint_resumes_fsdp_bit_for_bit_on_two_processes_and_on_one(ranks, name, tmp_path):
    ranks(2, "jobs_data_parallel.saved_by_torch", recipe=name, folder=str(tmp_path))
    resume = partial(ranks, folder=str(tmp_path), recipe=name)
    assert resume(2, "jobs_data_parallel.resumed_by_torch", is_sharded=True) == [[], []]
    assert resume(2, "jobs_data_parallel.resumed_by_torch", is_sharded=True, full=True) == [[], []]
    if name != "fp8-delayed":  # each process has a history
        assert resume(1, "jobs_data_parallel.resumed_by_torch", is_sharded=True) == [[]]
        assert resume(1, "jobs_data_parallel.resumed_by_torch", is_sharded=False) == [[]]


def test_torchs_checkpoint_is_refused_scales_of_several_rows(ranks):
    for found in ranks(2, "jobs_data_parallel.scales_of_several_rows"):
        assert "cannot divide scales of blocks of several rows among processes" in found


@pytest.mark.tier("thorough", keep=("nvfp4", "msamp-o3"))
@pytest.mark.parametrize("name", EVERY)
def test_fsdp_from_the_meta_device(ranks, name):
    for found in ranks(2, "jobs_data_parallel.from_meta", recipe=name):
        assert is_on_page(found) if name in NARROW else found < 0.05


@pytest.mark.tier("thorough")
def test_the_program_of_the_page(ranks):
    program, _, *of_two = blocks(PAGE, "python")
    assert ranks(2, "jobs_data_parallel.page", blocks=[program, *of_two]) == [[True, True]] * 2

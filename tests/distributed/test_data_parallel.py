"""Torch's DDP and FSDP2 around a converted model: they train as the package does, or say why not."""

from functools import partial

import pytest

from nn.own_loop import NARROW, PAGE, WIDE, is_on_page
from support.markdown import blocks

MORE = ("bf16-sr", "msamp-o1", "msamp-o2", "eco", "fp8-delayed", "nvfp4", "coat")


@pytest.mark.tier("nightly", keep=("msamp-o3", "nvfp4"))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "nvfp4"])
def test_ddp_of_a_prepared_model_trains_as_the_package(ranks, name):
    """Bit for bit: weights, masters, scales and norms, though the ranks start from different weights."""
    for found in ranks(2, "jobs_ddp.like_the_package", recipe=name):
        assert found == {"differ": [], "same": True}


@pytest.mark.tier("nightly", keep=("msamp-o3", "eco"))
@pytest.mark.tier("thorough", keep=("msamp-o3",))
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2", "msamp-o3", "eco"])
def test_collectives_see_values_and_leave_the_same_bits_everywhere(ranks, name):
    assert ranks(2, "jobs_ddp.collectives_of_weights", recipe=name) == [[True] * 5] * 2


@pytest.mark.tier("nightly", keep=("fp8-delayed", "msamp-o3"))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["fp8-delayed", "coat", *NARROW])
def test_replicas_stay_equal_whatever_a_loop_does(ranks, name):
    assert ranks(2, "jobs_ddp.ddp_with_eyes", recipe=name) == [True, True]


@pytest.mark.tier("thorough", keep=("unprepared ddp-None",))
@pytest.mark.parametrize("samples", [None, 8, 0])
@pytest.mark.parametrize("wrapper", ["ddp", "unprepared ddp", "fsdp"])
def test_ranks_draw_bits_of_their_own(ranks, wrapper, samples):
    """The last layer's output gradient is the same everywhere, and so are weights: only bits are left.

    Those of a weight and of signs are the first process's, though it has made a pass alone."""
    how = {"recipe": "quartet", "wrapper": wrapper, "samples": samples}
    for found in ranks(2, "jobs_ddp.bits_of_ranks", **how):
        if samples == 0:
            assert all(found.values()), "a loop that says which samples a pass has decides the bits"
            continue
        assert not found["1.3.wgrad.dy"], "the ranks drew the same bits for an output gradient"
        assert not found["1.3.wgrad.x"], "the ranks drew the same bits for an input"
        assert found["1.3.fprop.x"], "signs of a transform are the same on all ranks"
        assert all(same for place, same in found.items() if place.endswith(".w"))


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["msamp-o3", "msamp-o2"])
def test_ddp_of_a_resumed_model_that_nobody_prepared_trains_as_one_process(ranks, name):
    """To the bit, masters included: the ranks see the same samples, so that means are exact."""
    assert ranks(2, "jobs_ddp.plain_ddp_resumed", recipe=name) == [[], []]


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.parametrize("name", ["msamp-o3", "nvfp4", "fp8-delayed", "coat", "bf16-sr"])
def test_replicas_are_the_same_though_one_was_evaluated_before(ranks, name):
    assert ranks(2, "jobs_ddp.evaluated_by_one", recipe=name) == [True, True]


UNPREPARED = [
    ("bf16-sr", True, True),
    ("msamp-o3", True, False),
    ("nvfp4", False, False),
    ("msamp-o1", False, True),
    ("msamp-o2", False, False),
    ("coat", False, False),
]


@pytest.mark.tier("nightly", keep=4)
@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize(("name", "in_buckets", "finds_unused"), UNPREPARED)
def test_ddp_of_a_model_that_nobody_prepared(ranks, name, in_buckets, finds_unused):
    """Over micro-batches, with hooks and layers that some passes leave out: replicas are the same, and have
    the mean of the sums that each rank has in the recipe's format."""
    how = {"recipe": name, "finds_unused": finds_unused, "in_buckets": in_buckets}
    for rank, found in enumerate(ranks(2, "jobs_ddp.unprepared", **how)):
        *is_right, hooked = found
        assert is_right == [True, True, True]
        assert hooked == (8 if not finds_unused else 4 + 2 * (rank == 0))


#: Recipe and how: who shards, whose clip of gradients, where the model is made.
FSDP = [
    ("msamp-o3", {"by": "torch"}),
    ("nvfp4", {"device": "meta"}),
    ("msamp-o3", {"torchs_clip": True}),
    ("coat", {"by": "torch", "torchs_clip": True}),
    ("msamp-o3", {"device": "meta"}),
    ("bf16-sr", {}),
    ("fp8-delayed", {"torchs_clip": True}),
    *[(name, {}) for name in WIDE],
    *[(name, {"by": "torch"}) for name in ("bf16-sr", "fp8-delayed", "nvfp4")],
]


@pytest.mark.tier("nightly", keep=7)
@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize(("name", "how"), FSDP, ids=str)
def test_fsdp_trains_as_one_process_or_is_refused(ranks, name, how):
    for found in ranks(2, "jobs_fsdp.sharded", recipe=name, **how):
        if name in NARROW and ("by" in how or "device" in how):
            assert is_on_page(found)
            continue
        ours, alone = found["norms"]
        assert ours == pytest.approx(alone, rel=1e-5)
        assert found["apart"] < 0.05


@pytest.mark.tier("nightly", keep=("fp8-delayed", "msamp-o3"))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["msamp-o3", *MORE])
def test_a_checkpoint_resumes_fsdp_bit_for_bit_on_two_processes_and_on_one(ranks, name, tmp_path):
    """Both `torch.distributed.checkpoint` and `ng.state_dict` write one."""
    ranks(2, "jobs_fsdp.saved", recipe=name, folder=str(tmp_path))
    resume = partial(ranks, folder=str(tmp_path), recipe=name)
    for by in ("torch", "torch, through rank 0", "narrowgauge"):
        assert resume(2, "jobs_fsdp.resumed", by=by) == [[], []]
    if name != "fp8-delayed":  # each process has a history
        for is_sharded in (True, False):
            assert resume(1, "jobs_fsdp.resumed", by="torch", is_sharded=is_sharded) == [[]]


def test_torchs_checkpoint_is_refused_scales_of_several_rows(ranks):
    for found in ranks(2, "jobs_fsdp.scales_of_several_rows"):
        assert "cannot divide scales of blocks of several rows among processes" in found


@pytest.mark.tier("thorough")
def test_the_program_of_the_page(ranks):
    program, _, *of_two = blocks(PAGE, "python")
    assert ranks(2, "jobs_fsdp.page", blocks=[program, *of_two]) == [[True, True]] * 2

"""Checkpoints of several processes: real worlds over gloo, cut unevenly, damaged, out of disk."""

import os
import pickle
import re
import shutil
from itertools import pairwise

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import newest_valid, restore_distributed, steps
from narrowgauge.trainer.checkpoint.store.index import full_tensor
from support.checkpoint_ranks import assert_whole, local_tensors_of, same_bits, tensors_of
from support.fault_table import case
from support.hostile import Bomb

MODEL = "model-0000{}-of-00002.safetensors"
WHOLE = {"refused": [], "wrong": [], "rng": True}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Steps 1 and 2 of two ranks, to be copied."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture
def start(two, on_ranks, tmp_path):
    if not steps(two):
        assert on_ranks(2, "save", two, steps=[1, 2]).one == ["step-1", "step-2"]
    shutil.copytree(two, tmp_path / "c")
    return tmp_path / "c"


@case("B1", tier="thorough")
def test_every_world_reads_what_every_other_wrote(tmp_path, on_ranks):
    for step, (writers, readers) in enumerate(pairwise([2, 1, 3, 4, 2]), start=1):
        path = tmp_path / f"{writers}-{readers}"
        assert on_ranks(writers, "save", path, steps=[step]).one == [f"step-{step}"]
        said = on_ranks(readers, "restore", path).one
        assert said == WHOLE | {"path": f"step-{step}", "state": {"step": step, "list": [step]}}
        assert_whole(path / f"step-{step}", step)


def test_a_pickle_in_place_of_a_ranks_file_is_not_executed_and_sends_all_to_the_older_step(start, on_ranks):
    (start / "step-2" / MODEL.format(1)).write_bytes(pickle.dumps(Bomb(start / "marker")))
    said = on_ranks(3, "restore", start).one
    assert (said["path"], said["wrong"]) == ("step-1", [])
    (sentence,) = said["refused"]
    assert f"step-2/{MODEL.format(1)}" in sentence
    assert not (start / "marker").exists()


# Failing saves

FULL, FIRST = {"full": (1, 1000)}, {"full": (0, 5000)}
NO_SLICE = r"^UserError: tensor 'columns.torch.bfloat16' of 'model' cannot .*: no slice holds"
#: What is wrong with a save, on how many ranks, and the words that all of them say.
FAILURES = [
    (2, FULL, r"^SaveError: step 3 could not .*rank 1: \[Errno 27\] File too large: .*00002.saf"),
    (2, FIRST, r"rank 0: .*File too large"),
    (3, {"poison": 2}, r"^PoisonedError: rank 2: not saved: tensor 'columns.torch.float32@0,"),
    (2, {"hole": True}, NO_SLICE),
]


@case("D1", tier="quick")
@pytest.mark.parametrize(("ranks", "job", "words"), FAILURES)
def test_what_fails_on_one_rank_fails_the_save_on_all(start, on_ranks, ranks, job, words):
    world = on_ranks(ranks, "save", start, steps=[3], **job)
    assert world.codes == [1] * ranks
    assert re.search(words, world.one), world.one
    assert sorted(os.listdir(start)) == ["step-1", "step-2"]
    assert_whole(newest_valid(start, "run")[0], 2)


# Another model

#: What another model holds in place of a tensor (none: it is gone), and the words that refuse it.
DRIFTS = {
    "columns.torch.bfloat16": (None, "nothing here uses its 'columns.torch.bfloat16'"),
    "more": (torch.zeros(3), "it has no 'more' of 'model'"),
    "rows.torch.bfloat16": (torch.zeros(7, 6), "of 'model' as torch.bfloat16, and"),
    "rows.torch.uint8": (torch.zeros(9, 6, dtype=torch.uint8), "of 'model' is (7, 6) there and (9, 6) here"),
}


def test_drift_is_refused_by_name_before_anything_changes(start):
    whole = tensors_of(1)["optimizer"]
    for name, (tensor, words) in DRIFTS.items():
        held = local_tensors_of(tensors_of(1), 0, 1)
        held["model"].pop(name, None)
        if tensor is not None:
            held["model"][name] = [full_tensor(tensor)]
        with pytest.raises(UserError, match=re.escape(words)):
            restore_distributed(start / "step-2", held)
        assert all(same_bits(held["optimizer"][n][0].tensor, x) for n, x in whole.items())


def test_a_rank_reads_only_the_files_it_needs(start):
    """Another rank's file has gone bad: who needs nothing of it does not look."""
    held, truth = (local_tensors_of(tensors_of(step), 0, 2) for step in (1, 2))
    wanted = {
        group: {name: held[group].get(name, []) if "rows" in name else [] for name in {*named, *held[group]}}
        for group, named in tensors_of(1).items()
    }
    (start / "step-2" / MODEL.format(2)).write_bytes(b"")
    restore_distributed(start / "step-2", wanted)
    for group in wanted:
        for name in filter(lambda name: "rows" in name, truth[group]):
            assert same_bits(wanted[group][name][0].tensor, truth[group][name][0].tensor)
    with pytest.raises(UserError, match=MODEL.format(2)):
        restore_distributed(start / "step-2", local_tensors_of(tensors_of(1), 1, 2))

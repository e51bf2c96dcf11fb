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
from narrowgauge.trainer.checkpoint.store.slices import full_tensor
from support.checkpoint_ranks import assert_whole, local_tensors_of, same_bits, tensors_of
from support.fault_table import case
from support.hostile import Bomb

MODEL, OPTIMIZER = "model-0000{}-of-00002.safetensors", "optimizer-0000{}-of-00002.safetensors"
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


def test_one_process_without_a_group_reads_any_part(start):
    held = local_tensors_of(tensors_of(1), 3, 4)
    restore_distributed(start / "step-2", held)
    for group, named in local_tensors_of(tensors_of(2), 3, 4).items():
        for name, parts in named.items():
            assert all(same_bits(a.tensor, b.tensor) for a, b in zip(parts, held[group][name], strict=True))


def test_what_all_ranks_hold_is_written_once_and_by_turns(tmp_path, on_ranks):
    on_ranks(4, "save", tmp_path, steps=[1])
    for group, named in tensors_of(1).items():
        files = [path.read_bytes() for path in (tmp_path / "step-1").glob(f"{group}-*")]
        assert len(files) == 4
        headers = sum(8 + int.from_bytes(data[:8], "little") for data in files)
        assert sum(map(len, files)) == headers + sum(x.nbytes for x in named.values())


def test_when_none_is_valid_all_ranks_stop(start, on_ranks):
    for step in (1, 2):
        (start / f"step-{step}" / MODEL.format(2)).unlink()
    world = on_ranks(2, "restore", start)
    assert world.codes == [1, 1]
    assert "does not start again from step 0 unasked" in world.one


def test_a_pickle_in_place_of_a_ranks_file_is_not_executed_and_sends_all_to_the_older_step(start, on_ranks):
    (start / "step-2" / MODEL.format(1)).write_bytes(pickle.dumps(Bomb(start / "marker")))
    said = on_ranks(3, "restore", start).one
    assert (said["path"], said["wrong"]) == ("step-1", [])
    (sentence,) = said["refused"]
    assert f"step-2/{MODEL.format(1)}" in sentence
    assert not (start / "marker").exists()


# Failing saves

FULL = {"small_files_on": 1, "largest_file": 1000}
#: What is wrong with a save, on how many ranks, and the words that all of them say.
FAILURES = {
    "full disk, second rank": (
        2,
        FULL,
        (r"^SaveError: step 3 could not .*rank 1: \[Errno 27\] File too large: .*00002.saf"),
    ),
    "no disk, second rank": (
        2,
        FULL | {"largest_file": 0},
        r"rank 1: \[Errno 27\] File too large: .*00002.saf",
    ),
    "full disk, first rank": (2, {"small_files_on": 0, "largest_file": 5000}, r"rank 0: .*File too large"),
    "a NaN": (3, {"poison": 2}, r"^PoisonedError: rank 2: not saved: tensor 'columns.torch.float32@0,"),
    "a hole": (
        2,
        {"hole": True},
        r"^UserError: tensor 'columns.torch.bfloat16' of 'model' cannot .*: no slice holds",
    ),
}


@case("D1", tier="quick")
@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_on_one_rank_fails_the_save_on_all(start, on_ranks, kind):
    ranks, job, words = FAILURES[kind]
    world = on_ranks(ranks, "save", start, steps=[3], **job)
    assert world.codes == [1] * ranks
    assert re.search(words, world.one), world.one
    assert sorted(os.listdir(start)) == ["step-1", "step-2"]
    assert_whole(newest_valid(start, "run")[0], 2)


# Another model

DRIFTS = {
    "drop": ("columns.torch.bfloat16", "nothing here uses its 'columns.torch.bfloat16'"),
    "add": ("more", "it has no 'more' of 'model'"),
    "dtype": ("rows.torch.bfloat16", "keeps 'rows.torch.bfloat16' of 'model' as torch.bfloat16, and"),
    "shape": ("rows.torch.uint8", "'rows.torch.uint8' of 'model' is (7, 6) there and (99, 6) here"),
}


@pytest.mark.parametrize("kind", DRIFTS)
def test_drift_is_refused_by_name_before_anything_changes(start, on_ranks, kind):
    name, words = DRIFTS[kind]
    said = on_ranks(2, "restore", start, changes=[("model", name, kind)]).one
    assert words in said["error"]
    assert said["error"].startswith("UserError: ")
    assert said["changed"] == []


def test_a_group_that_nobody_names_is_left_alone(start):
    truth = tensors_of(2)["model"]
    held = {name: [full_tensor(torch.empty_like(x))] for name, x in truth.items()}
    held["tied"] = [full_tensor(torch.zeros(7, 6, dtype=torch.bfloat16))]
    restore_distributed(start / "step-2", {"model": held})
    assert all(same_bits(held[name][0].tensor, x) for name, x in truth.items())
    assert same_bits(held["tied"][0].tensor, truth["rows.torch.bfloat16"])


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

"""Checkpoints of several processes: real worlds over gloo, cut unevenly, killed, damaged, out of disk."""

import os
import shutil
from itertools import pairwise

import pytest
import torch

from narrowgauge.checkpoint import load, newest_valid, restore_distributed, save, steps
from narrowgauge.checkpoint.store.slices import full_tensor
from narrowgauge.errors import UserError
from support.checkpoint_ranks import local_tensors_of, same_bits, tensors_of

MODEL, OPTIMIZER = "model-0000{}-of-00002.safetensors", "optimizer-0000{}-of-00002.safetensors"
WRITTEN = [f"{moment}:{file}" for file in (MODEL, OPTIMIZER) for moment in ("write", "written", "synced")]
ON_FIRST = [
    "begun",
    *(point.format(1) for point in WRITTEN),
    *(f"{moment}:{name}.json" for name in ("index", "state", "manifest") for moment in ("write", "synced")),
    "sealed",
    "publish",
    "published",
    "durable",
    "purge:step-1",
    "purging:step-1",
    "purged:step-1",
]
ON_SECOND = [point.format(2) for point in WRITTEN]


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


def assert_whole(path, step):
    """What `load` returns is what the step held, and the tied name is the same object."""
    loaded = load(path)
    assert (loaded.step, loaded.state) == (step, {"step": step})
    for group, named in tensors_of(step).items():
        for name, x in named.items():
            assert same_bits(loaded.tensors[group][name], x), name
    assert loaded.tensors["model"]["tied"] is loaded.tensors["model"]["rows.torch.bfloat16"]
    assert loaded.tensors["model"].keys() == {*tensors_of(step)["model"], "tied"}


@pytest.mark.tier("thorough")
def test_every_world_reads_what_every_other_wrote(tmp_path, on_ranks):
    sizes = [2, 1, 3, 4, 2]
    for step, (writers, readers) in enumerate(pairwise(sizes), start=1):
        path = tmp_path / f"{writers}-{readers}"
        assert on_ranks(writers, "save", path, steps=[step]).one == [f"step-{step}"]
        said = on_ranks(readers, "restore", path).one
        assert said == {
            "path": f"step-{step}",
            "refused": [],
            "state": {"step": step},
            "wrong": [],
            "rng": True,
        }
        assert_whole(path / f"step-{step}", step)


def test_one_process_without_a_group_reads_any_part(start):
    held = local_tensors_of(tensors_of(1), 3, 4)
    restore_distributed(start / "step-2", held)
    for group, named in local_tensors_of(tensors_of(2), 3, 4).items():
        for name, parts in named.items():
            assert all(same_bits(a.tensor, b.tensor) for a, b in zip(parts, held[group][name], strict=True))


def test_what_all_ranks_hold_is_written_once_and_by_turns(tmp_path, on_ranks):
    on_ranks(4, "save", tmp_path, steps=[1])
    files = [file for file in (tmp_path / "step-1").iterdir() if file.suffix == ".safetensors"]
    sizes = {
        group: [f.stat().st_size for f in files if f.name.startswith(group)]
        for group in ("model", "optimizer")
    }
    data = {group: sum(x.nbytes for x in named.values()) for group, named in tensors_of(1).items()}
    for group, own in sizes.items():
        assert len(own) == 4
        headers = sum(
            8 + int.from_bytes(f.read_bytes()[:8], "little") for f in files if f.name.startswith(group)
        )
        assert sum(own) == headers + data[group]


@pytest.mark.tier("thorough", keep=8)
@pytest.mark.parametrize("point", [*ON_FIRST, *ON_SECOND, "synced:state.json@0", f"{ON_SECOND[1]}@1"])
def test_killed_at_any_point_of_any_rank_the_old_or_the_new_one_is_whole(start, on_ranks, point):
    world = on_ranks(2, "save", start, crash_at=point, steps=[3])
    killed = 1 if point.split("@")[0] in ON_SECOND else 0
    assert world.codes[killed] == 137
    assert world.codes[1 - killed] == 1, "the other rank ends too, and not by itself as if all were well"
    visible = point in ON_FIRST and ON_FIRST.index(point) >= ON_FIRST.index("published")
    path, refused = newest_valid(start, "run")
    assert (path, refused) == (start / f"step-{3 if visible else 2}", [])
    assert_whole(path, 3 if visible else 2)
    assert on_ranks(2, "save", start, steps=[3]).one == ["step-3"]
    assert sorted(os.listdir(start)) == ["step-2", "step-3"]


def test_a_crash_point_of_another_rank_is_not_ours(start, on_ranks):
    assert on_ranks(2, "save", start, crash_at="begun@1", steps=[3]).codes == [0, 0]


@pytest.mark.tier("thorough")
def test_every_flipped_bit_of_every_file_sends_all_ranks_to_the_older_step(start, on_ranks):
    for file in sorted((start / "step-2").iterdir()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        before = file.read_bytes()
        file.write_bytes(data)
        said = on_ranks(3, "restore", start).one
        assert (said["path"], said["wrong"]) == ("step-1", [])
        (sentence,) = said["refused"]
        assert f"step-2/{file.name}" in sentence
        file.write_bytes(before)
    assert on_ranks(3, "restore", start).one["path"] == "step-2"


def test_when_none_is_valid_all_ranks_stop(start, on_ranks):
    for step in (1, 2):
        (start / f"step-{step}" / MODEL.format(2)).unlink()
    world = on_ranks(2, "restore", start)
    assert world.codes == [1, 1]
    assert "does not start again from step 0 unasked" in world.one


# Failing saves


@pytest.mark.parametrize("largest", [0, 100, 1000])
def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all(start, on_ranks, largest):
    world = on_ranks(2, "save", start, steps=[3], small_files_on=1, largest_file=largest)
    assert world.codes == [1, 1]
    assert world.one.startswith("SaveError: step 3 could not be saved under ")
    assert "(rank 1: [Errno 27] File too large: " in world.one
    assert f"{OPTIMIZER.format(2)}')" in world.one or f"{MODEL.format(2)}')" in world.one
    assert sorted(os.listdir(start)) == ["step-1", "step-2"]
    assert_whole(newest_valid(start, "run")[0], 2)


def test_a_full_disk_where_the_first_rank_publishes(start, on_ranks):
    world = on_ranks(2, "save", start, steps=[3], small_files_on=0, largest_file=5000)
    assert world.codes == [1, 1]
    assert "rank 0: " in world.one
    assert "File too large" in world.one
    assert sorted(os.listdir(start)) == ["step-1", "step-2"]


def test_a_nan_on_one_rank_is_named_on_all(start, on_ranks):
    world = on_ranks(3, "save", start, steps=[3], poison=2)
    assert world.codes == [1, 1, 1]
    assert world.one.startswith("PoisonedError: rank 2: not saved: tensor 'columns.torch.float32@0,")
    assert sorted(os.listdir(start)) == ["step-1", "step-2"]


def test_a_slice_that_nobody_holds_is_refused(start, on_ranks):
    world = on_ranks(2, "save", start, steps=[3], hole=True)
    assert world.codes == [1, 1]
    assert (
        "UserError: tensor 'columns.torch.bfloat16' of 'model' cannot be saved: no slice holds" in world.one
    )
    assert sorted(os.listdir(start)) == ["step-1", "step-2"]


# Another model


@pytest.mark.parametrize(
    ("group", "name", "kind", "words"),
    [
        ("model", "columns.torch.bfloat16", "drop", "nothing here uses its 'columns.torch.bfloat16'"),
        ("model", "more", "add", "it has no 'more' of 'model'"),
        (
            "model",
            "rows.torch.bfloat16",
            "dtype",
            "keeps 'rows.torch.bfloat16' of 'model' as torch.bfloat16, and",
        ),
        (
            "model",
            "rows.torch.uint8",
            "shape",
            "'rows.torch.uint8' of 'model' is (7, 6) there and (99, 6) here",
        ),
    ],
)
def test_drift_is_refused_by_name_before_anything_changes(start, on_ranks, group, name, kind, words):
    said = on_ranks(2, "restore", start, changes=[(group, name, kind)]).one
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
    held, truth = local_tensors_of(tensors_of(1), 0, 2), local_tensors_of(tensors_of(2), 0, 2)
    wanted = {
        group: {name: parts if "rows" in name else [] for name, parts in held[group].items()}
        for group in held
    }
    for group in wanted:
        wanted[group] |= {name: [] for name in tensors_of(1)[group] if name not in wanted[group]}
    (start / "step-2" / MODEL.format(2)).write_bytes(b"")
    restore_distributed(start / "step-2", wanted)
    for group in wanted:
        for name in filter(lambda name: "rows" in name, truth[group]):
            assert same_bits(wanted[group][name][0].tensor, truth[group][name][0].tensor)
    with pytest.raises(UserError, match=MODEL.format(2)):
        restore_distributed(start / "step-2", local_tensors_of(tensors_of(1), 1, 2))


def test_a_pickle_in_place_of_a_ranks_file_is_refused_and_not_executed(start, on_ranks):
    import pickle

    marker = start / "marker"

    class Payload:
        def __reduce__(self):
            return (exec, (f"open({str(marker)!r}, 'w').close()",))

    (start / "step-2" / MODEL.format(1)).write_bytes(pickle.dumps(Payload()))
    said = on_ranks(2, "restore", start).one
    assert said["path"] == "step-1"
    assert MODEL.format(1) in said["refused"][0]
    assert not marker.exists()


@pytest.mark.tier("thorough")
def test_many_saves_keep_two_valid_ones(tmp_path, on_ranks):
    on_ranks(2, "save", tmp_path, steps=list(range(1, 26)))
    assert steps(tmp_path) == [24, 25]
    assert_whole(tmp_path / "step-24", 24)


def test_one_rank_is_the_plain_save(tmp_path):
    save(tmp_path, 1, {"model": {"w": torch.ones(2, 3)}}, {}, 2, "run")
    assert sorted(os.listdir(tmp_path / "step-1")) == [
        "index.json",
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]

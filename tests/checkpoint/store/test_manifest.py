import hashlib
import json
import os
import time

import pytest
import torch

from narrowgauge.checkpoint import DamagedError, newest_valid, read_manifest, save, verify
from narrowgauge.checkpoint.store.manifest import VERSION
from narrowgauge.errors import UserError
from support.fault_table import case

FILES = ["index.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture
def two(tmp_path):
    """A directory with steps 1 and 2; the tests damage step 2."""
    for step in (1, 2):
        tensors = {"model": {"w": torch.full((50,), float(step))}, "optimizer": {"m": torch.ones(20)}}
        save(tmp_path, step, tensors, {"step": step}, keep=2, run_id="run")
    assert sorted(os.listdir(tmp_path / "step-2")) == FILES
    return tmp_path


def assert_falls_back(directory, *words):
    path, refused = newest_valid(directory, "run")
    assert path == directory / "step-1"
    (sentence,) = refused
    for word in words:
        assert word in sentence


@pytest.mark.tier("thorough", keep=("manifest.json",))
@case("C1", tier="quick")
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(two, name):
    path = two / "step-2" / name
    data = path.read_bytes()
    verify(two / "step-2", "run")
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match=name):
            verify(two / "step-2")  # without a run id to compare with
    assert_falls_back(two, name)
    path.write_bytes(data)
    assert newest_valid(two, "run") == (two / "step-2", [])


@case("C2", tier="quick")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "grown", "link", "pipe", "directory"])
def test_damaged_files_are_named_and_the_older_step_is_used(two, name, damage):
    path = two / "step-2" / name
    data = path.read_bytes()
    path.unlink()
    if damage in ("cut", "empty", "grown"):
        path.write_bytes({"cut": data[:-1], "empty": b"", "grown": data + b"\0"}[damage])
    elif damage == "link":
        (two / "elsewhere").write_bytes(data)
        path.symlink_to(two / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "directory":
        path.mkdir()
    size_differs = damage in ("cut", "empty", "grown") and name != "manifest.json"
    assert_falls_back(
        two, str(path), *([f"bytes, but its manifest lists {len(data)}"] if size_differs else [])
    )


@case("C2", tier="quick")
def test_extra_files_are_refused(two):
    (two / "step-2" / "readme.txt").write_text("a note")
    assert_falls_back(two, "readme.txt", "nothing may be added")


def test_shards_of_two_steps_are_never_mixed(two):
    (two / "step-2" / "model.safetensors").write_bytes((two / "step-1" / "model.safetensors").read_bytes())
    assert_falls_back(two, "model.safetensors", "sha256")


def test_a_linked_or_renamed_directory_is_refused(two):
    (two / "step-2").rename(two / "step-3")
    assert_falls_back(two, "step-3", "is of step 2")
    (two / "step-3").rename(two / "real")
    (two / "step-2").symlink_to(two / "real")
    assert_falls_back(two, "step-2", "not a directory")
    (two / "step-2").unlink()
    (two / "step-2").write_text("a file")
    assert_falls_back(two, "step-2", "not a directory")


def test_another_run_is_refused_by_name(two):
    with pytest.raises(UserError, match=r"is of run 'run', but this run is 'other'.*step 0 unasked"):
        newest_valid(two, "other")
    assert newest_valid(two, None)[0] == two / "step-2"


def seal(content):
    """The text of a manifest with a correct digest of itself: what a forger writes."""
    digests = [""]
    digests.append(
        hashlib.sha256((json.dumps(content | {"sha256": ""}, indent=1, sort_keys=True) + "\n").encode())
    )
    return json.dumps(content | {"sha256": digests[1].hexdigest()}, indent=1, sort_keys=True) + "\n"


@case("C6", tier="quick")
@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        ".hidden",
        "a\\b",
        "a\0b",
        "manifest.json",
        "x" * 300,
    ],
)
def test_a_forged_manifest_cannot_point_outside(two, name):
    path = two / "step-2" / "manifest.json"
    content = json.loads(path.read_text())
    assert seal(content) == path.read_text()  # the forger's pen writes what we write
    outside = b"outside"
    (two / "outside").write_bytes(outside)
    content["files"][name] = {"size": len(outside), "sha256": hashlib.sha256(outside).hexdigest()}
    path.write_text(seal(content))
    assert_falls_back(two, "manifest.json", "not a plain file name")


@pytest.mark.parametrize(
    "change",
    [
        {"step": "2"},
        {"step": True},
        {"step": -2},
        {"step": None},
        {"run_id": 5},
        {"files": []},
        {"files": None},
        {"files": {"state.json": 5}},
        {"files": {"state.json": {"size": 1.5, "sha256": "0" * 64}}},
        {"files": {"state.json": {"size": -1, "sha256": "0" * 64}}},
        {"files": {"state.json": {"size": 1, "sha256": None}}},
        {"files": {"state.json": {"size": 1, "sha256": "0" * 64, "more": 1}}},
        {"more": 1},
        {"version": 0},
        {"version": "1"},
    ],
    ids=str,
)
def test_a_manifest_of_another_shape_is_refused(two, change):
    path = two / "step-2" / "manifest.json"
    path.write_text(seal(json.loads(path.read_text()) | change))
    assert_falls_back(two, "manifest.json")


@case("C2", tier="quick")
@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", "garbage", "[" * 100_000, '{"step": ' + "9" * 5000 + "}"]
)
def test_garbage_is_no_manifest(two, text):
    (two / "step-2" / "manifest.json").write_text(text)
    assert_falls_back(two, "manifest.json")


def test_names_that_appear_twice_are_refused(two):
    path = two / "step-2" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace(' "run_id"', ' "step": 2,\n "run_id"'))
    assert_falls_back(two, "manifest.json", "its own digest")


def test_a_manifest_from_the_future_says_which_version(two):
    path = two / "step-2" / "manifest.json"
    path.write_text(seal(json.loads(path.read_text()) | {"version": VERSION + 1}))
    assert_falls_back(two, f"has version {VERSION + 1}", "use a newer one")


def test_a_huge_manifest_is_refused_fast(two):
    with (two / "step-2" / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    start = time.perf_counter()
    assert_falls_back(two, "manifest.json is larger than")
    assert time.perf_counter() - start < 1


def test_the_manifest_says_what_is_there(two):
    manifest = read_manifest(two / "step-2")
    assert (manifest.step, manifest.run_id) == (2, "run")
    for name, entry in manifest.files.items():
        data = (two / "step-2" / name).read_bytes()
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())

"""A step is what its manifest says, byte for byte; anything else is named, and an older one is used."""

import hashlib
import json
import os
import shutil

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import DamagedError, newest_valid, save, verify
from narrowgauge.trainer.checkpoint.store.manifest import VERSION
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


DAMAGE = {
    "cut": lambda path, data: path.write_bytes(data[:-1]),
    "empty": lambda path, data: path.write_bytes(b""),
    "grown": lambda path, data: path.write_bytes(data + b"\0"),
    "missing": lambda path, data: None,
    "link": lambda path, data: path.symlink_to(path.parent.parent / "step-1" / path.name),
    "pipe": lambda path, data: os.mkfifo(path),
    "directory": lambda path, data: path.mkdir(),
}


@case("C2", tier="quick")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named_and_the_older_step_is_used(two, damage):
    for name in FILES:
        path = two / "step-2" / name
        data = path.read_bytes()
        path.unlink()
        DAMAGE[damage](path, data)
        is_of_other_size = damage in ("cut", "empty", "grown") and name != "manifest.json"
        words = [f"bytes, but its manifest lists {len(data)}"] if is_of_other_size else []
        assert_falls_back(two, str(path), *words)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        assert newest_valid(two, "run") == (two / "step-2", [])


@case("C2", tier="quick")
def test_a_directory_that_is_not_the_step_is_passed_over(two):
    step, real = two / "step-2", two / "real"
    (step / "readme.txt").write_text("a note")
    assert_falls_back(two, "readme.txt", "nothing may be added")
    (step / "readme.txt").unlink()
    step.rename(two / "step-3")
    assert_falls_back(two, "step-3", "is of step 2")
    (two / "step-3").rename(real)
    step.symlink_to(real)
    assert_falls_back(two, "step-2", "not a directory")
    step.unlink()
    step.write_text("a file")
    assert_falls_back(two, "step-2", "not a directory")
    step.unlink()
    real.rename(step)
    shutil.copy(two / "step-1" / "model.safetensors", step)  # shards of two steps
    assert_falls_back(two, "model.safetensors", "sha256")


def test_another_run_is_refused_by_name(two):
    with pytest.raises(UserError, match=r"is of run 'run', but this run is 'other'.*step 0 unasked"):
        newest_valid(two, "other")
    assert newest_valid(two, None)[0] == two / "step-2"


def seal(content):
    """The text of a manifest with a correct digest of itself: what a forger writes."""
    blank = json.dumps(content | {"sha256": ""}, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(blank.encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}, indent=1, sort_keys=True) + "\n"


def one_file(**entry):
    return {"files": {"state.json": {"size": 1, "sha256": "0" * 64} | entry}}


SHAPES = [
    *({"step": step} for step in ("2", True, -2, None)),
    {"run_id": 5},
    *({"files": files} for files in ([], None, {"state.json": 5})),
    *(one_file(**entry) for entry in ({"size": 1.5}, {"size": -1}, {"sha256": None}, {"more": 1})),
    {"more": 1},
    {"version": 0},
    {"version": "1"},
]
OUTSIDE = ["../outside", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\\b", "a\0b"]
OUTSIDE += ["manifest.json", "x" * 300]
GARBAGE = ["", "null", "[]", "7", "garbage", "[" * 100_000, '{"step": ' + "9" * 5000 + "}"]


@case("C2", "C6", tier="quick")
def test_a_forged_or_other_manifest_is_refused(two):
    """Another shape, names that lead outside, the future, a name twice, or no manifest at all."""
    path = two / "step-2" / "manifest.json"
    text = path.read_text()
    content = json.loads(text)
    assert seal(content) == text  # the forger's pen writes what we write
    (two / "outside").write_bytes(b"outside")
    entry = {"size": 7, "sha256": hashlib.sha256(b"outside").hexdigest()}
    outside = [content | {"files": content["files"] | {name: entry}} for name in OUTSIDE]
    future = (f"has version {VERSION + 1}", "use a newer one")
    for forged, words in [
        *((seal(content | shape), ()) for shape in SHAPES),
        *((seal(other), ("not a plain file name",)) for other in outside),
        *((garbage, ()) for garbage in GARBAGE),
        (seal(content | {"version": VERSION + 1}), future),
        (text.replace(' "run_id"', ' "step": 2,\n "run_id"'), ("its own digest",)),
    ]:
        path.write_text(forged)
        assert_falls_back(two, "manifest.json", *words)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse; it is never read
    assert_falls_back(two, "manifest.json is larger than")

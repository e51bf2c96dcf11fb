"""What is saved comes back bit for bit, a save that fails leaves nothing, and no hostile file is believed."""

import json
import math
import os
import pickle
import re

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import DamagedError, SaveError, load, newest_valid, save
from narrowgauge.trainer.checkpoint.store.before_save import PoisonedError
from support.checkpoint_ranks import assert_whole, same_bits
from support.fault_table import case
from support.hostile import MALFORMED, OTHER, SOUND, Bomb, forge

EIGHT = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
NAMES = ("float64", "float32", "bfloat16", "float16", *EIGHT, "float4_e2m1fn_x2")
NAMES += ("uint8", "int32", "int64", "bool")
DTYPES = [getattr(torch, name) for name in NAMES]


def finite(dtype):
    """16 elements: random finite ones with the smallest subnormals and -0 of floating dtypes among them."""
    if dtype is torch.bool:
        return torch.arange(16) % 3 == 0
    if dtype.itemsize == 1:
        codes = torch.randperm(120)[:16].to(torch.uint8)  # codes below 120 are finite in every 8-bit format
        codes[0] = 1
        return codes.view(dtype)
    if not dtype.is_floating_point:
        return torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, *range(14)], dtype=dtype)
    x = torch.randn(16, dtype=torch.float64).to(dtype)
    x[0], x[1], x[2] = -0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max
    return x


def save_one(tmp_path, tensors, state=None):
    return load(save(tmp_path / "c", 1, tensors, state or {}, keep=2, run_id="run"))


@case("E7", tier="quick")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bit_for_bit_with_any_shape_and_stride(tmp_path, dtype):
    x = finite(dtype)
    named = {"flat": x, "zero-dim": x[3], "empty": x[:0].reshape(0, 5)}
    named |= {"strided": x.reshape(4, 4).clone().t(), "every second": x.clone()[1::2]}
    if dtype is torch.float4_e2m1fn_x2:
        del named["zero-dim"]  # safetensors counts the two halves of a byte: a last dimension is needed
    loaded = save_one(tmp_path, {"model": named}).tensors["model"]
    assert loaded.keys() == named.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in named.items())


def test_tied_weights_are_stored_once_and_views_of_one_storage_each(tmp_path):
    w, base = torch.nn.Parameter(torch.randn(100, 10)), torch.arange(12.0).reshape(3, 4)
    views = {"base": base, "transposed": base.t(), "row": base[1], "integers": base.view(torch.int32)}
    loaded = save_one(tmp_path, {"model": {"embed": w, "head": w} | views}).tensors["model"]
    assert loaded["head"] is loaded["embed"]
    assert same_bits(loaded["head"], w.detach())
    assert all(same_bits(loaded[name], tensor) for name, tensor in views.items())
    path = tmp_path / "c/step-1"
    assert (path / "model.safetensors").stat().st_size < 1.4 * w.nbytes
    for file in path.iterdir():
        file.unlink()
    loaded["embed"] += 1  # it can be changed, and outlives the files
    assert same_bits(loaded["head"], w.detach() + 1)


def test_state_keeps_floats_and_integers_exactly(tmp_path):
    state = {"lr": 0.1 + 0.2, "tiny": 5e-324, "minus zero": -0.0, "big": 2**127 + 1}
    state |= {"text": "na\u00efve \U0001f680\n", "nested": {"a": [1, None, True, {"b": []}]}}
    loaded = save_one(tmp_path, {}, state).state
    assert loaded == state
    assert math.copysign(1, loaded["minus zero"]) == -1


@case("E7", tier="quick")
def test_save_leaves_the_trajectory_alone(tmp_path):
    torch.manual_seed(0)
    before, w = torch.get_rng_state(), torch.nn.Parameter(torch.ones(4))
    w.sum().backward()
    save(tmp_path, 1, {"model": {"w": w}}, {}, keep=2, run_id="run")
    load(tmp_path / "step-1")
    assert torch.equal(torch.get_rng_state(), before)
    assert w.requires_grad
    assert torch.equal(w.grad, torch.ones(4))


# Failing saves


@case("D1", tier="quick")
def test_a_full_disk_keeps_the_old_checkpoint_removes_the_draft_and_says_so(tmp_path, on_ranks):
    assert on_ranks(1, "save", tmp_path, steps=[1]).codes == [0]
    sizes = sorted(file.stat().st_size for file in (tmp_path / "step-1").iterdir())
    for largest in (0, 10, *(size - 1 for size in sizes)):  # the last byte of each file has no room
        ended = on_ranks(1, "save", tmp_path, steps=[2], full=(0, largest))
        assert ended.codes == [1]
        assert ended.one.startswith("SaveError: step 2 could not be saved under ")
        assert re.search(r"\[Errno 27\] File too large: '/.*/step-2\..*\.(safetensors|json)'\)", ended.one)
        assert os.listdir(tmp_path) == ["step-1"]
    assert_whole(tmp_path / "step-1", 1)
    assert on_ranks(1, "save", tmp_path, steps=[2]).codes == [0]
    assert newest_valid(tmp_path, "run") == (tmp_path / "step-2", [])


def test_a_directory_that_cannot_be_made_is_a_save_error_with_its_cause(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in its place")
    with pytest.raises(SaveError, match=r"File exists: '.*/checkpoints'.*untouched") as caught:
        save(tmp_path / "checkpoints", 1, {}, {}, keep=2, run_id="run")
    assert isinstance(caught.value, UserError)
    with pytest.raises(SaveError, match="/proc/"):
        save(tmp_path.__class__("/proc/narrowgauge"), 1, {}, {}, keep=2, run_id="run")


def test_what_is_not_finite_is_named_and_nothing_is_published(tmp_path):
    tensors = {"model": {"good": torch.ones(3)}, "optimizer": {"v": torch.tensor([1.0, math.nan])}}
    state = {"guard": [1, {"loss": math.nan}], "x": math.inf}
    for put, more, error, words in [
        (tensors, {}, PoisonedError, r"tensor 'v' of 'optimizer' holds a NaN .* nothing non-finite is ever"),
        ({}, state, UserError, r"state\['guard'\]\[1\]\['loss'\] and 1 more holds a NaN"),
        ({}, {"a": {1: 2}}, AssertionError, "JSON turns other keys into strings"),
    ]:
        with pytest.raises(error, match=words):
            save(tmp_path / "c", 1, put, more, keep=2, run_id="run")
    assert not (tmp_path / "c").exists()


# Hostile files


def index_of(**changes):
    """An index of one tensor of four bytes, with changes to its entry."""
    return {"groups": {"model": {"a": {"boxes": [BOX], "dtype": "U8", "shape": [4]} | changes}}, "version": 1}


BOX = {"file": "model.safetensors", "key": "a", "offset": [0], "size": [4]}
HALF = BOX | {"size": [2]}
FORGED = {
    "overlap": index_of(boxes=[HALF, BOX | {"key": "b", "offset": [1], "size": [3]}]),
    "a hole": index_of(boxes=[HALF]),
    "no boxes": index_of(boxes=[]),
    "beyond the shape": index_of(boxes=[BOX | {"offset": [1]}]),
    "one key twice": index_of(boxes=[HALF, HALF | {"offset": [2]}]),
    "more than the file has": index_of(shape=[2**50], boxes=[BOX | {"size": [2**50]}]),
    "an empty box": index_of(boxes=[BOX, BOX | {"key": "b", "offset": [4], "size": [0]}]),
    "numbers that are no integers": index_of(boxes=[BOX | {"size": [4.0]}]),
    "another file": index_of(boxes=[BOX | {"file": "other.safetensors"}]),
    "the state as a file of tensors": index_of(boxes=[BOX | {"file": "state.json"}]),
    "a path with ..": index_of(boxes=[BOX | {"file": "../step-7/model.safetensors"}]),
    "a list for a key": index_of(boxes=[BOX | {"key": ["a"]}]),
    "unknown dtype": index_of(dtype="PICKLE"),
    "same as itself": {"groups": {"model": {"a": {"same_as": "a"}}}, "version": 1},
    "no groups": {"version": 1},
    "names are a list": {"groups": {"model": ["a"]}, "version": 1},
    "a file that is not named": {"groups": {}, "version": 1},
    "of the future": index_of() | {"version": 2},
}
HONEST = {
    "index.json": json.dumps(index_of()).encode(),
    "model.safetensors": SOUND,
    "state.json": b'{"a": 1}',
}
#: What a sealed step holds in place of an honest file, and the words for it.
LIES = [
    *(("model.safetensors", data, "is not a safetensors file") for data in (MALFORMED | OTHER).values()),
    *(("index.json", json.dumps(i).encode(), "is not an index that can be trusted") for i in FORGED.values()),
    *(("state.json", data, "is not") for data in (b"[1]", b"", b"{", b"[" * 100_000, b'{"a": 1}\xff')),
    ("state.json", None, "is missing"),
    ("index.json", None, "is missing"),
]


@case("C6", tier="quick")
def test_a_sealed_step_does_not_help_a_file_that_lies(tmp_path):
    loaded = load(forge(tmp_path / "step-7", HONEST))
    assert loaded.tensors["model"]["a"].tolist() == [49, 50, 51, 52]
    assert (loaded.state, loaded.step, loaded.run_id) == ({"a": 1}, 7, "run")
    for number, (name, data, words) in enumerate(LIES):
        files = HONEST | {name: data} if data is not None else {n: d for n, d in HONEST.items() if n != name}
        with pytest.raises(DamagedError, match=f"{name} {words}"):
            load(forge(tmp_path / f"{number}" / "step-7", files))


@case("C5", tier="quick")
@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_never_executed(tmp_path, writer):
    marker, file = tmp_path / "marker", tmp_path / "payload"
    file.write_bytes(pickle.dumps(Bomb(marker)))
    if writer == "torch":
        torch.save({"w": Bomb(marker)}, file)
    for name in (*HONEST, "manifest.json", "model.pt", ".metadata"):
        path = forge(tmp_path / name / "step-7", HONEST | {name: file.read_bytes()})
        if name == "manifest.json":
            (path / name).write_bytes(file.read_bytes())
        with pytest.raises(DamagedError, match=name):
            load(path)
        assert not marker.exists()
    torch.load(file, weights_only=False) if writer == "torch" else pickle.loads(file.read_bytes())
    assert marker.exists()  # the payload was a live one

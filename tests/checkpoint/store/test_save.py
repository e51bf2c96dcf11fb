import json
import math
import os
import struct
import time

import pytest
import torch

from narrowgauge.checkpoint import (
    DamagedError,
    PoisonedError,
    SaveError,
    load,
    newest_valid,
    read_manifest,
    save,
    steps,
)
from narrowgauge.checkpoint.store.manifest import FileEntry, Manifest
from narrowgauge.errors import UserError
from support.fault_table import case

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a, b):
    assert a.dtype is b.dtype
    assert a.shape == b.shape
    assert torch.equal(bits(a), bits(b))


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
    named = {
        "flat": x,
        "zero-dim": x[3],
        "empty": x[:0].reshape(0, 5),
        "strided": x.reshape(4, 4).clone().t(),
        "every second": x.clone()[1::2],
    }
    if dtype is torch.float4_e2m1fn_x2:
        del named["zero-dim"]  # safetensors counts the two halves of a byte: a last dimension is needed
    loaded = save_one(tmp_path, {"model": named}).tensors["model"]
    assert loaded.keys() == named.keys()
    for name, tensor in named.items():
        assert_same(loaded[name], tensor)


def test_tied_weights_are_stored_once_and_loaded_as_one(tmp_path):
    w = torch.nn.Parameter(torch.randn(100, 10))
    loaded = save_one(tmp_path, {"model": {"embed": w, "other": torch.zeros(3), "head": w}}).tensors["model"]
    assert loaded["head"] is loaded["embed"]
    assert_same(loaded["head"], w.detach())
    assert (tmp_path / "c/step-1/model.safetensors").stat().st_size < 1.2 * w.nbytes


def test_different_views_of_one_storage_are_all_kept(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    named = {
        "base": base,
        "transposed": base.t(),
        "row": base[1],
        "as integers": base.view(torch.int32),
        "again": base,
    }
    loaded = save_one(tmp_path, {"model": named}).tensors["model"]
    for name, tensor in named.items():
        assert_same(loaded[name], tensor)


def test_loaded_tensors_can_be_changed_and_outlive_the_files(tmp_path):
    loaded = save_one(tmp_path, {"model": {"w": torch.ones(5000)}}).tensors["model"]["w"]
    for file in (tmp_path / "c/step-1").iterdir():
        file.unlink()
    loaded += 1
    assert loaded.sum() == 10_000


def test_state_keeps_floats_and_integers_exactly(tmp_path):
    state = {
        "lr": 0.1 + 0.2,
        "tiny": 5e-324,
        "minus zero": -0.0,
        "big": 2**127 + 1,
        "text": "na\u00efve \U0001f680\n",
        "nested": {"a": [1, None, True, {"b": []}]},
    }
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


def test_a_full_disk_keeps_the_old_checkpoint_removes_the_draft_and_says_so(tmp_path, in_process):
    assert in_process("save", tmp_path, step=1).code == 0
    for largest in (0, 10, 1000, 80_000):  # of a model file of a little more than 80 kB
        ended = in_process("save", tmp_path, step=2, elements=20_000, largest_file=largest)
        assert ended.code == 1
        assert ended.said.startswith("SaveError: step 2 could not be saved under ")
        assert "File too large: " in ended.said
        assert "/model.safetensors')" in ended.said
        assert os.listdir(tmp_path) == ["step-1"]
    assert load(tmp_path / "step-1").state == {"step": 1}
    assert in_process("save", tmp_path, step=2).code == 0
    assert steps(tmp_path) == [1, 2]


def test_a_full_disk_at_the_manifest_too(tmp_path, in_process):
    ended = in_process("save", tmp_path, step=2, elements=1, largest_file=400)  # all else is smaller
    assert ended.code == 1
    assert ended.said.startswith("SaveError: step 2 could not be saved under ")
    assert "File too large" in ended.said
    assert os.listdir(tmp_path) == []
    assert newest_valid(tmp_path) == (None, [])


def test_a_directory_that_cannot_be_made_is_a_save_error_with_its_cause(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in its place")
    with pytest.raises(SaveError, match=r"File exists: '.*/checkpoints'.*untouched") as caught:
        save(tmp_path / "checkpoints", 1, {}, {}, keep=2, run_id="run")
    assert isinstance(caught.value, UserError)
    with pytest.raises(SaveError, match="/proc/"):
        save(tmp_path.__class__("/proc/narrowgauge"), 1, {}, {}, keep=2, run_id="run")


def test_a_poisoned_tensor_is_named_and_nothing_is_published(tmp_path):
    put = {
        "model": {"good": torch.ones(3)},
        "optimizer": {"m": torch.ones(3), "v": torch.tensor([1.0, math.nan])},
    }
    with pytest.raises(
        PoisonedError, match=r"tensor 'v' of 'optimizer' holds a NaN .* nothing non-finite is ever"
    ):
        save(tmp_path / "c", 1, put, {}, keep=2, run_id="run")
    assert not (tmp_path / "c").exists()


def test_state_numbers_must_be_finite_too(tmp_path):
    with pytest.raises(UserError, match=r"state\['guard'\]\[1\]\['loss'\] and 1 more holds a NaN"):
        save(tmp_path, 1, {}, {"guard": [1, {"loss": math.nan}], "x": math.inf}, keep=2, run_id="run")
    with pytest.raises(AssertionError, match="JSON turns other keys into strings"):
        save(tmp_path, 1, {}, {"a": {1: 2}}, keep=2, run_id="run")
    assert os.listdir(tmp_path) == []


# Hostile files


def index_of(**changes):
    """An index of one tensor of four bytes, with changes to its entry."""
    box = {"file": "model.safetensors", "key": "a", "offset": [0], "size": [4]}
    return {
        "groups": {"model": {"a": {"boxes": [box], "dtype": "U8", "shape": [4]} | changes}},
        "version": 1,
    }


def forge(directory, files, step=7):
    """A directory with a manifest that agrees with whatever is in it, as an attacker would make it."""
    import hashlib

    path = directory / f"step-{step}"
    path.mkdir(parents=True)
    files = {"index.json": json.dumps(index_of()).encode()} | files
    entries = {}
    for name, data in files.items():
        (path / name).write_bytes(data)
        entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    (path / "manifest.json").write_text(Manifest(step, "run", entries).to_json())
    return path


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
HOSTILE = {
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "header beyond the file": struct.pack("<Q", 10_000) + b"{}",
    "overlapping offsets": safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 6]}}, b"123456"),
    "offsets beyond the file": safetensors(
        {"a": ENTRY | {"shape": [400], "data_offsets": [0, 400]}}, b"1234"
    ),
    "shape and offsets disagree": safetensors({"a": ENTRY | {"shape": [2**40]}}, b"1234"),
    "a hole": safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [6, 10]}}, b"0123456789"),
    "unknown dtype": safetensors({"a": ENTRY | {"dtype": "PICKLE"}}, b"1234"),
    "another dtype than the index says": safetensors({"a": ENTRY | {"dtype": "I8"}}, b"1234"),
    "another shape than the index says": safetensors({"a": ENTRY | {"shape": [2, 2]}}, b"1234"),
    "another key than the index says": safetensors({"b": ENTRY}, b"1234"),
    "four bytes": b"1234",
    "seven bytes": b"1234567",
    "header is not JSON": safetensors(b"\x80\x04cos\nsystem\n"),
}


@case("C6", tier="quick")
@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_forged_manifest_does_not_help_a_hostile_safetensors_file(tmp_path, payload):
    path = forge(tmp_path, {"model.safetensors": payload, "state.json": b"{}"})
    start = time.perf_counter()
    with pytest.raises(DamagedError, match=r"model.safetensors is not a safetensors file"):
        load(path)
    assert time.perf_counter() - start < 1


class Payload:
    """Unpickling this writes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (exec, (f"open({str(self.marker)!r}, 'w').close()",))


@case("C5", tier="quick")
@pytest.mark.parametrize(
    "name", ["model.safetensors", "index.json", "state.json", "manifest.json", "model.pt", ".metadata"]
)
@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_never_executed(tmp_path, name, writer):
    import pickle

    marker, file = tmp_path / "marker", tmp_path / "payload"
    file.write_bytes(pickle.dumps(Payload(marker)))
    if writer == "torch":
        torch.save({"w": Payload(marker)}, file)
    path = forge(tmp_path, {"model.safetensors": safetensors({"a": ENTRY}, b"1234"), "state.json": b"{}"})
    if name == "manifest.json":
        (path / name).write_bytes(file.read_bytes())
    else:
        files = {f.name: f.read_bytes() for f in path.iterdir() if f.name != "manifest.json"}
        path = forge(tmp_path / "2", files | {name: file.read_bytes()})
    with pytest.raises(DamagedError, match=name):
        load(path)
    assert not marker.exists()
    torch.load(file, weights_only=False) if writer == "torch" else pickle.loads(file.read_bytes())
    assert marker.exists()  # the payload was a live one


@pytest.mark.parametrize("state", [b"[1]", b"", b"{", b"[" * 100_000, b'{"a": 1}\xff'])
def test_a_forged_manifest_does_not_help_a_broken_state(tmp_path, state):
    with pytest.raises(DamagedError, match=r"state.json is not"):
        load(forge(tmp_path, {"state.json": state}))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    with pytest.raises(DamagedError, match=r"state.json is missing"):
        load(forge(tmp_path, {"model.safetensors": safetensors({})}))
    whole = {"model.safetensors": safetensors({"a": ENTRY}, b"1234"), "state.json": b"{}"}
    path = forge(tmp_path / "2", whole)
    entries = read_manifest(path).files
    (path / "manifest.json").write_text(
        Manifest(7, "run", {name: e for name, e in entries.items() if name != "index.json"}).to_json()
    )
    (path / "index.json").unlink()
    with pytest.raises(DamagedError, match=r"index.json is missing"):
        load(path)


BOX = {"file": "model.safetensors", "key": "a", "offset": [0], "size": [4]}
HALF = BOX | {"size": [2]}
FORGED = {
    "overlap": index_of(boxes=[HALF, BOX | {"key": "b", "offset": [1], "size": [3]}]),
    "a hole": index_of(boxes=[HALF]),
    "no boxes": index_of(boxes=[]),
    "beyond the shape": index_of(boxes=[BOX | {"offset": [1]}]),
    "before the shape": index_of(boxes=[BOX | {"offset": [-1]}]),
    "other dimensions": index_of(boxes=[BOX | {"offset": [0, 0], "size": [4, 1]}]),
    "one key twice": index_of(boxes=[HALF, HALF | {"offset": [2]}]),
    "more than the file has": index_of(shape=[2**50], boxes=[BOX | {"size": [2**50]}]),
    "an empty box": index_of(boxes=[BOX, BOX | {"key": "b", "offset": [4], "size": [0]}]),
    "numbers that are no integers": index_of(boxes=[BOX | {"size": [4.0]}]),
    "truth for a number": index_of(shape=[True], boxes=[BOX | {"size": [True]}]),
    "another file": index_of(boxes=[BOX | {"file": "other.safetensors"}]),
    "the state as a file of tensors": index_of(boxes=[BOX | {"file": "state.json"}]),
    "a path with ..": index_of(boxes=[BOX | {"file": "../step-7/model.safetensors"}]),
    "an absolute path": index_of(boxes=[BOX | {"file": "/etc/passwd"}]),
    "no file": index_of(boxes=[BOX | {"file": None}]),
    "a list for a key": index_of(boxes=[BOX | {"key": ["a"]}]),
    "unknown dtype": index_of(dtype="PICKLE"),
    "a list for a dtype": index_of(dtype=["U8"]),
    "same as nothing": {"groups": {"model": {"a": {"same_as": "b"}}}, "version": 1},
    "same as itself": {"groups": {"model": {"a": {"same_as": "a"}}}, "version": 1},
    "no groups": {"version": 1},
    "groups are a list": {"groups": [], "version": 1},
    "names are a list": {"groups": {"model": ["a"]}, "version": 1},
    "a file that is not named": {"groups": {}, "version": 1},
    "of the future": index_of() | {"version": 2},
}


@pytest.mark.parametrize("index", FORGED.values(), ids=FORGED.keys())
def test_a_forged_index_is_refused(tmp_path, index):
    files = {"model.safetensors": safetensors({"a": ENTRY}, b"1234"), "state.json": b"{}"}
    path = forge(tmp_path, files | {"index.json": json.dumps(index).encode()})
    start = time.perf_counter()
    with pytest.raises(DamagedError, match=r"index.json is not an index that can be trusted"):
        load(path)
    assert time.perf_counter() - start < 1


def test_an_honest_forgery_loads_for_contrast(tmp_path):
    path = forge(
        tmp_path, {"model.safetensors": safetensors({"a": ENTRY}, b"1234"), "state.json": b'{"a": 1}'}
    )
    loaded = load(path)
    assert loaded.tensors["model"]["a"].tolist() == [49, 50, 51, 52]
    assert (loaded.state, loaded.step, loaded.run_id) == ({"a": 1}, 7, "run")

"""C5 and C6. Files that were made to do harm: never executed, never believed, refused at once."""

import hashlib
import json
import os
import pickle
import struct
import time

import numpy as np
import pytest
import torch

from narrowgauge.checkpoint import FileEntry, Manifest, read_manifest
from support.fault_runs import newest
from support.fault_table import RANKS, case

SHORT = {"training.steps": 12, "checkpoint.every": 3}


class Bomb:
    """Unpickling this makes a directory."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def bomb(tmp_path):
    """(bytes of a pickle, what it makes when it goes off); it is a live one."""
    mark = tmp_path / "exploded"
    data = pickle.dumps(Bomb(mark))
    pickle.loads(data)
    mark.rmdir()
    yield data
    assert not mark.exists(), "something was executed"


def forge(step, files):
    """Files of a checkpoint, and a manifest that agrees with them, as an attacker would make it."""
    manifest = read_manifest(step)
    for name, data in files.items():
        (step / name).write_bytes(data)
    entries = {
        path.name: FileEntry(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in step.iterdir()
        if path.name != "manifest.json"
    }
    (step / "manifest.json").write_text(Manifest(manifest.step, manifest.run_id, entries).to_json())


@case("C5", tier="thorough")
@RANKS
def test_a_pickle_in_place_of_any_file_of_a_checkpoint(runs, tmp_path, bomb, ranks):
    runs.copy(tmp_path / "run", SHORT, ranks)
    own = [name for name in os.listdir(newest(tmp_path / "run")) if name != "manifest.json"]
    torch.save({"a": torch.ones(1)}, tmp_path / "zip.pt")
    for name in [*own, "manifest.json", "a.metadata", "model.pt", "rank0.distcp"]:
        out = tmp_path / f"bomb-{name}"
        runs.copy(out, SHORT, ranks)
        if name == "manifest.json":
            (newest(out) / name).write_bytes(bomb)
        else:
            forge(newest(out), {name: bomb})
        ended = runs.start(runs.words(SHORT), out, ranks).wait(60)
        assert set(ended.codes) <= {0, 2}, ended.err
        assert name in ended.out + ended.err
        assert "Traceback" not in ended.err


@pytest.mark.tier("thorough")
@case("C5", tier="quick")
def test_a_pickle_from_elsewhere(runs, narrowgauge, tmp_path, bomb):
    """As tokens, as a tokenizer, as a model to import."""
    objects = tmp_path / "tokens.npy"
    np.save(objects, np.array([Bomb(tmp_path / "exploded")], dtype=object), allow_pickle=True)
    for name in ("tokenizer.json", "tokenizer.model", "train.bin", "model.pt", "hub/pytorch_model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bomb)
    out = tmp_path / "run"
    for words in (
        [*runs.words(), "--data.source", objects],
        [*runs.words(), "--data.source", tmp_path / "train.bin"],
        [*runs.words(), "--data.tokenizer", tmp_path / "tokenizer.json"],
        [*runs.words(), "--data.tokenizer", tmp_path / "tokenizer.model"],
        ["import", tmp_path / "model.pt"],
        ["import", tmp_path / "hub"],
    ):
        ended = narrowgauge(*words, "--out", out)
        assert ended.code == 2, (words, ended.err)
        assert ended.err.startswith("narrowgauge: ")
        assert ended.err.count("\n") == 1, ended.err
        if words[0] == "import":
            assert "a pickle" in ended.err
        assert not (out / "checkpoints").exists()


def safetensors(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
HOSTILE = {
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "a header of 4 GB": struct.pack("<Q", 4 << 30) + b"{}",
    "overlap": safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 6]}}, b"123456"),
    "beyond the file": safetensors({"a": ENTRY | {"shape": [2**40], "data_offsets": [0, 2**40]}}, b"1234"),
}


@case("C6")
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_header_is_refused_at_once_in_little_memory(runs, out, hostile):
    runs.copy(out, SHORT)
    forge(newest(out), {"model.safetensors": HOSTILE[hostile]})
    start = time.monotonic()
    ended = runs.start(runs.words(SHORT), out, memory=12 << 30).wait()
    assert ended.codes == [2]
    assert "/checkpoints/step-12/" in ended.err
    assert "model.safetensors" in ended.err
    assert "trusted" in ended.err
    assert time.monotonic() - start < 1 + runs.seconds({"training.steps": 1})

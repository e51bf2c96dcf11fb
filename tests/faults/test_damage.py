"""C. Damaged and hostile files: refused by name, never executed, and the run goes on from what is sound."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import time

import numpy as np
import pytest
import torch

from faults.harness import WIDE, contents, flip_a_bit, newest
from faults.table import RANKS, case
from narrowgauge.checkpoint import FileEntry, Manifest, newest_valid, read_manifest

SHORT = {"training.steps": 12, "checkpoint.every": 3}


def continues_from_before(runs, out, ranks, named):
    """The newest step is passed over, its file named, and the run ends as the undisturbed one."""
    ended = runs.finish(runs.words(SHORT), out, ranks)
    assert f"passed over: {named}" in ended.out
    assert "after step 9" in ended.out
    assert runs.look(out).trajectory == runs.undisturbed(SHORT, ranks).trajectory


@case("C1", quick=True)
@RANKS
def test_one_flipped_bit_in_each_file_of_the_newest_checkpoint(runs, tmp_path, ranks):
    runs.copy(tmp_path / "run", SHORT, ranks)
    names = sorted(os.listdir(newest(tmp_path / "run")))
    assert {"manifest.json"} < set(names)
    for name in names:
        out = tmp_path / f"flipped-{name}"
        runs.copy(out, SHORT, ranks)
        flip_a_bit(newest(out) / name)
        continues_from_before(runs, out, ranks, f"{out}/checkpoints/step-12/{name}")


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def grown(file):
    with file.open("ab") as stream:
        stream.write(b"\0")


def of_another_step(file):
    (older,) = (p for p in file.parent.parent.glob("step-*") if p != file.parent)
    shutil.copy(older / file.name, file)


DAMAGE = {
    "cut": cut,
    "grown": grown,
    "empty": lambda file: os.truncate(file, 0),
    "missing": os.unlink,
    "of another step": of_another_step,
    "garbage": lambda file: file.write_bytes(os.urandom(500)),
}


@case("C2")
@RANKS
@pytest.mark.parametrize("damage", DAMAGE)
def test_each_file_damaged_in_each_way(runs, tmp_path, damage, ranks):
    runs.copy(tmp_path / "run", SHORT, ranks)
    for name in sorted(os.listdir(newest(tmp_path / "run"))):
        out = tmp_path / f"{damage}-{name}"
        runs.copy(out, SHORT, ranks)
        before = (newest(out) / name).read_bytes()
        DAMAGE[damage](newest(out) / name)
        if (newest(out) / name).exists() and (newest(out) / name).read_bytes() == before:
            continue  # a file that is the same in both steps
        continues_from_before(runs, out, ranks, f"{out}/checkpoints/step-12/{name}")


@case("C2")
@RANKS
def test_a_file_that_does_not_belong_there(runs, out, ranks):
    runs.copy(out, SHORT, ranks)
    (newest(out) / "more.safetensors").write_bytes(b"")
    continues_from_before(runs, out, ranks, f"{out}/checkpoints/step-12/more.safetensors")


@case("C2", quick=True)
@RANKS
def test_a_checkpoint_of_another_run_is_passed_over(runs, out, ranks):
    other = runs.undisturbed(SHORT | {"training.seed": 1, "training.steps": 15}, ranks).path
    runs.copy(out, SHORT, ranks)
    shutil.copytree(newest(other), out / "checkpoints" / "step-15")
    ended = runs.finish(runs.words(SHORT), out, ranks)
    assert "step-15/manifest.json is of run" in ended.out
    assert runs.look(out).trajectory[0] == runs.undisturbed(SHORT, ranks).trajectory[0]


@case("C3", quick=True)
@RANKS
def test_when_all_checkpoints_are_damaged_nothing_is_trained(runs, out, ranks):
    look = runs.copy(out, SHORT, ranks)
    lines = look.lines
    for step in (9, 12):
        name = max(os.listdir(out / "checkpoints" / f"step-{step}"))  # any file of it
        flip_a_bit(out / "checkpoints" / f"step-{step}" / name)
    ended = runs.start(runs.words(SHORT), out, ranks).wait(60)
    assert set(ended.codes) == {2}
    sentences = set(ended.err.splitlines())
    assert len(sentences) == 1, "one sentence, whichever rank says it"
    for words in ("step-9/", "step-12/", "delete that directory to start anew"):
        assert words in ended.err
    assert look.lines == lines, "the record of what was done stays"


@case("C4")
@RANKS
@pytest.mark.parametrize("future", ["deleted", "damaged", "under another name"])
def test_going_back_and_killed_on_the_way_over_the_same_steps(runs, out, future, ranks):
    """The second way over steps 10 to 12 dies inside its save again and again, beside what the first left."""
    look = runs.copy(out, SHORT, ranks)
    checkpoints = out / "checkpoints"
    (checkpoints / "step-12.tmp-0000dead").mkdir()
    if future == "deleted":
        shutil.rmtree(checkpoints / "step-12")
    elif future == "damaged":
        flip_a_bit(checkpoints / "step-12" / "manifest.json")
    else:
        (checkpoints / "step-12").rename(checkpoints / "step-21")
    for point in ("synced:state.json", "sealed", "publish"):
        ended = runs.start(runs.words(SHORT), out, ranks, NARROWGAUGE_CRASH_AT=point).wait()
        assert 137 in ended.codes, ended.err
        assert newest_valid(checkpoints)[0] == checkpoints / "step-9"
    runs.finish(runs.words(SHORT), out, ranks)
    assert look.trajectory == runs.undisturbed(SHORT, ranks).trajectory
    assert newest_valid(checkpoints) == (checkpoints / "step-12", [])
    assert not list(checkpoints.glob("*.tmp-*"))


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


@case("C5", quick=True)
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


@case("C5", quick=True)
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


OTHER = {
    "optimizer.lr": ("0.01", "optimizer.lr"),
    "recipe.name": ("mxfp8", "recipe.name"),
    "recipe.fprop.x": ("bf16", "recipe"),
    "training.seed": ("7", "training.seed"),
    "data.tokenizer": ("bpe-270", "data.tokenizer"),
    "model.ffn_dim": ("96", "model.ffn_dim"),
}


@case("C7")
@RANKS
@pytest.mark.parametrize("key", OTHER)
def test_another_configuration_is_refused_with_what_is_other(runs, out, key, ranks):
    runs.copy(out, SHORT, ranks)
    before = {name: data for name, data in contents(out) if name != ".lock"}
    value, named = OTHER[key]
    more = ["--model.vocab_size", "300"] if key == "data.tokenizer" else []
    ended = runs.start([*runs.words(SHORT), f"--{key}", value, *more], out, ranks).wait()
    assert set(ended.codes) == {2}, ended.err
    assert named in ended.err or (more and "model.vocab_size" in ended.err)
    assert {name: data for name, data in contents(out) if name != ".lock"} == before


@case("C7")
def test_another_text_under_the_same_name_is_refused(runs, out, text, tmp_path):
    source = tmp_path / "text"
    shutil.copytree(text, source)
    words = runs.words(SHORT | {"data.source": source})
    runs.finish(words, out)
    (out / "status.json").unlink()
    (source / "00.txt").write_text("something else\n" * 10)
    ended = runs.start(words, out).wait()
    assert ended.codes == [2]
    assert "restore text and tokenizer" in ended.err


@case("C7")
def test_another_text_of_a_recipe_is_refused(runs, out, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[fprop]\nx = 'mxfp8'\n")
    words = runs.words(SHORT | {"recipe.name": recipe})
    runs.finish(words, out)
    (out / "status.json").unlink()
    recipe.write_text("[fprop]\nx = 'mxfp4'\n")
    ended = runs.start(words, out).wait()
    assert ended.codes == [2]
    assert "another text of recipe" in ended.err


@case("C7")
@RANKS
def test_a_change_that_is_allowed_by_name_is_made_and_told(runs, out, ranks):
    look = runs.copy(out, SHORT, ranks)
    words = [*runs.words(SHORT), "--optimizer.lr", "0.01", "--training.steps", "18"]
    one = runs.start([*words, "--allow-change", "optimizer.lr"], out, ranks).wait()
    assert set(one.codes) == {2}, "the other change was not allowed"
    assert "training.steps" in one.err
    runs.finish([*words, "--allow-change", "optimizer.lr,training.steps"], out, ranks)
    assert look.column("step") == list(range(1, 19))
    old = runs.undisturbed(SHORT, ranks).column("loss")
    assert look.column("loss")[:12] == old
    assert "optimizer.lr" in json.dumps(look.lines)


@case("C8")
@RANKS
def test_state_of_another_kind_is_refused_until_it_is_converted(runs, narrowgauge, tmp_path, ranks):
    """A run with fp32 moments, and an optimizer whose moments are FP8 and FP16."""
    wide, out = WIDE | SHORT | {"recipe.name": "bf16"}, tmp_path / "run"
    runs.copy(out, wide, ranks)
    before = {name: data for name, data in contents(out) if name != ".lock"}
    narrow = runs.words(wide | {"recipe.name": "msamp-o2"})
    ended = runs.start(narrow, out, ranks).wait()
    assert set(ended.codes) == {2}
    assert "recipe.name" in ended.err
    for name in ("config.toml", "recipe.toml"):  # even if somebody edits what the run says of itself
        other = runs.undisturbed(wide | {"recipe.name": "msamp-o2"}, ranks).path
        shutil.copy(other / name, out / name)
    ended = runs.start(narrow, out, ranks).wait()
    assert set(ended.codes) == {2}
    for name, data in before.items():
        if name.startswith("checkpoints"):
            assert (out / name).read_bytes() == data
        if name in ("config.toml", "recipe.toml"):
            (out / name).write_bytes(data)
    converted = narrowgauge("convert", out, "--recipe", "msamp-o2", "--out", tmp_path / "converted")
    assert converted.code == 0, converted.err



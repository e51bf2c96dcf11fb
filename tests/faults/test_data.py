"""F1 to F3. Data: what is malformed or changed is named by its place, before the first step."""

import json
import os
import struct

import numpy as np
import pytest

from support.fault_table import case

GOOD = b'{"text": "narrow gauge"}\n'
BAD_LINES = {
    "cut": (b'{"text": "b\n', "is not JSON"),
    "wrong type": (b'{"text": 7}\n', "where a text belongs"),
    "no text": (b'{"id": 1}\n', "has no 'text'"),
    "bad UTF-8": (b'{"text": "caf\xe9"}\n', "is not UTF-8"),
    "NUL": (b'{"text": "a\x00b"}\n', "NUL"),
    "BOM in the middle": (b'\xef\xbb\xbf{"text": "b"}\n', "is not JSON"),
    "40 MB": (b'{"text": "' + b"x" * (40 << 20) + b'"}\n', "is a line of more than 32 MiB"),
}


@pytest.mark.tier("thorough")  # ten seconds and more
@case("F1", tier="quick")
def test_a_malformed_line_is_named_or_set_aside(narrowgauge, tmp_path):
    """Strict: file, line, reason. Tolerant: counted and kept aside, up to a share."""
    for name, (line, says) in BAD_LINES.items():
        source = tmp_path / f"{name}.jsonl"
        source.write_bytes(GOOD * 60 + line + GOOD * 60)
        words = ["prepare", source, "--tokenizer", "bytes", "--out"]
        strict = narrowgauge(*words, tmp_path / f"{name} strict", memory=12 << 30)
        assert strict.code == 2, name
        assert f"{source}:61" in strict.err
        assert says in strict.err, name
        assert not (tmp_path / f"{name} strict").exists()
        tolerant = narrowgauge(*words, tmp_path / name, "--tolerant", "0.02", memory=12 << 30)
        assert tolerant.code == 0, tolerant.err
        (aside,) = map(json.loads, (tmp_path / name / "rejected.jsonl").read_text().splitlines())
        assert aside["where"] == f"{source}:61"
        source.write_bytes(GOOD * 60 + line * 3)
        few = narrowgauge(*words, tmp_path / f"{name} few", "--tolerant", "0.02")
        assert few.code == 2, "more than the share that is tolerated"
        assert not (tmp_path / f"{name} few").exists()


@pytest.mark.tier("thorough")
@case("F1", tier="quick")
@pytest.mark.parametrize("content", [b"", b"\n \n\t\n" * 50], ids=["empty", "only blanks"])
def test_a_file_without_a_record_is_refused(narrowgauge, tmp_path, content):
    source = tmp_path / "empty.jsonl"
    source.write_bytes(content)
    ended = narrowgauge("prepare", source, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert ended.code == 2
    assert str(source) in ended.err
    assert not (tmp_path / "out").exists()


def grow(file):
    with file.open("ab") as out:
        out.write(b"\1\0")


def swap(file):
    other = file.with_name("val.bin" if file.name == "train.bin" else "train.bin")
    middle = file.with_name("middle")
    file.rename(middle)
    other.rename(file)
    middle.rename(other)


def other_dtype(file):
    data = file.read_bytes()
    ids = np.frombuffer(data[1024:], dtype="<u2").astype("<u4")
    file.write_bytes(struct.pack("<2i", 20240801, 7) + data[8:1024] + ids.tobytes())


def flip(file):
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


HARM = {
    "cut by one": lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut by two": lambda file: os.truncate(file, file.stat().st_size - 2),
    "grown": grow,
    "swapped": swap,
    "of another dtype": other_dtype,
    "one bit": flip,
}


@case("F2", tier="quick")
@pytest.mark.parametrize("harm", HARM)
def test_token_files_that_changed_are_refused_before_the_first_step(runs, narrowgauge, text, tmp_path, harm):
    corpus, out = tmp_path / "corpus", tmp_path / "run"
    assert narrowgauge("prepare", text, "--tokenizer", "bytes", "--out", corpus).code == 0
    HARM[harm](corpus / "train.bin")
    ended = narrowgauge(*runs.words({"data.source": corpus, "data.tokenizer": "auto"}), "--out", out)
    assert ended.code == 2, ended.err
    assert str(corpus) in ended.err
    assert "Traceback" not in ended.err
    assert not (out / "metrics.jsonl").exists()


@case("F3", tier="quick")
def test_ids_beyond_the_vocabulary_are_refused_with_their_position(runs, narrowgauge, tmp_path):
    ids = np.arange(4000) % 256
    ids[1234] = 50_000
    header = struct.pack("<3i", 20240520, 1, len(ids)).ljust(1024, b"\0")
    (tmp_path / "train.bin").write_bytes(header + ids.astype("<u2").tobytes())
    words = runs.words({"data.source": tmp_path / "train.bin", "data.tokenizer": "bytes"})
    ended = narrowgauge(*words, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "50000" in ended.err
    assert "1234" in ended.err


@pytest.mark.tier("thorough")
@case("F3", tier="quick")
def test_less_than_one_sequence_is_refused(runs, narrowgauge, tmp_path):
    """Of 32 tokens and the one after them, to train on or held out."""
    for name, sizes in (("training", (20, 20)), ("held-out", (100, 20))):
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / name / f"{number}.txt").write_text("g" * size)
        ended = narrowgauge(*runs.words({"data.source": tmp_path / name}), "--out", tmp_path / "run")
        assert ended.code == 2
        assert f"the {name} part of the data holds 21 tokens" in ended.err
        assert "data.sequence_length" in ended.err
        assert not (tmp_path / "run").exists()

"""F. Data: what is malformed is named by its place, what was cut off begins anew to the same bytes."""

import http.server
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import struct
import threading
import time
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

from faults.harness import alive, contents, descendants
from faults.table import case
from narrowgauge.data.sources.hub import retried
from narrowgauge.errors import UserError

GOOD = b'{"text": "narrow gauge"}\n'
BAD_LINES = {
    "cut": (b'{"text": "b\n', "is not JSON"),
    "wrong type": (b'{"text": 7}\n', "where a text belongs"),
    "no text": (b'{"id": 1}\n', "has no 'text'"),
    "bad UTF-8": (b'{"text": "caf\xe9"}\n', "is not UTF-8"),
    "NUL": (b'{"text": "a\x00b"}\n', "NUL"),
    "BOM in the middle": (b'\xef\xbb\xbf{"text": "b"}\n', "is not JSON"),
    "100 MB": (b'{"text": "' + b"x" * (100 << 20) + b'"}\n', "is a line of more than 32 MiB"),
}


@case("F1", quick=True)
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


@case("F1", quick=True)
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


@case("F2", quick=True)
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


@case("F3", quick=True)
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


@case("F3", quick=True)
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


@case("F3", quick=True)
def test_nothing_but_masked_targets_is_refused(runs, narrowgauge, tmp_path):
    """A token file whose mask leaves no target: every step would learn nothing, without a word."""
    for name in ("train.bin", "val.bin"):
        ids = np.arange(4000) % 256
        header = (b"BIN.TOK\n" + struct.pack("<5i", 2, 4, len(ids), 257, 1)).ljust(1024, b"*")
        (tmp_path / name).write_bytes(header + ids.astype("<i4").tobytes() + bytes(len(ids) // 8))
    words = runs.words({"data.source": tmp_path / "train.bin", "data.tokenizer": "bytes"})
    ended = narrowgauge(*words, "--out", tmp_path / "run")
    assert ended.code == 2, ended.out
    assert "mask" in ended.err


@pytest.fixture
def lines(tmp_path):
    """Enough JSON lines for two workers and some seconds."""
    rng = random.Random(0)
    words = ["narrow", "gauge", "caf\u00e9", "<|endoftext|>", "steam\n\n"]
    with (tmp_path / "lines.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(30_000):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=40))}) + "\n")
    return tmp_path / "lines.jsonl"


@case("F4")
@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_killed_at_random_moments_makes_the_same_bytes_at_last(narrowgauge, lines, tmp_path, workers):
    seed = secrets.randbits(32)
    print(f"delays from random.Random({seed})")
    rng, words = random.Random(seed), ["prepare", lines, "--tokenizer", "bpe-300", "--workers", workers]
    start = time.monotonic()
    assert narrowgauge(*words, "--out", tmp_path / "undisturbed").code == 0
    longest, out = time.monotonic() - start, tmp_path / "place" / "out"
    expected = dict(contents(tmp_path / "undisturbed"))
    for _ in range(6):
        process = narrowgauge.start(*words, "--out", out)
        time.sleep(rng.uniform(0, longest))
        process.send(signal.SIGKILL)
        process.wait()
        if out.exists():  # whole or not at all
            assert dict(contents(out)) == expected
            shutil.rmtree(out)
    for left in out.parent.rglob("*"):  # after an hour it is taken for abandoned
        os.utime(left, (time.time() - 4000,) * 2)
    assert narrowgauge(*words, "--out", out).code == 0
    assert dict(contents(out)) == expected
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@contextmanager
def served(answer):
    """The address of a server on this machine; `answer(path)` is the body, or None for 503."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = answer(self.path)
            self.send_response(503 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        do_HEAD = do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@case("F5")
@pytest.mark.parametrize("failures", [1, 3, 100])
def test_remote_reads_that_fail(failures):
    """One row a request; the fifth row fails so often. Pauses grow, the order stays, and it ends some time."""
    left, pauses = [failures], []

    def answer(path):
        row = int(path.rpartition("/")[2])
        if row == 5 and left[0]:
            left[0] -= 1
            return None
        return json.dumps({"text": f"row {row}"} if row < 20 else None).encode()

    def rows(skip):
        for row in itertools.count(skip):
            with urllib.request.urlopen(f"{address}/{row}") as reply:
                content = json.load(reply)
            if content is None:
                return
            yield content

    got = []
    with served(answer) as address:
        reading = retried(rows, "a/b", sleep=pauses.append)
        if failures < 100:
            got.extend(reading)
            assert [row["text"] for row in got] == [f"row {n}" for n in range(20)]
        else:
            with pytest.raises(UserError, match=r"failed in 4 attempts, after 5 rows"):
                got.extend(reading)
    assert len(pauses) == min(failures, 3)
    assert pauses == sorted(set(pauses)), "each pause is longer than the one before"


@case("F5")
def test_a_hub_that_is_down_is_told_in_a_sentence(narrowgauge, tmp_path):
    """The library has its own retries below ours: this takes about two minutes, of which all is waiting."""
    pytest.importorskip("datasets")
    with served(lambda path: None) as address:
        where = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        ended = narrowgauge.start("prepare", "hf:some/thing", "--out", tmp_path / "out", **where).wait(300)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("narrowgauge: data set 'some/thing' failed in 4 attempts, after 0 rows")
    assert f"the mirror HF_ENDPOINT={address}" in last
    assert not (tmp_path / "out").exists()


@case("F6")
def test_a_worker_that_is_killed_is_missed_and_the_same_line_goes_on(narrowgauge, lines, tmp_path):
    """Training reads through a thread; the processes that read are those of prepare."""
    words = ["prepare", lines, "--tokenizer", "bpe-300", "--workers", "2", "--out", tmp_path / "out"]
    process = narrowgauge.start(*words)
    process.until(lambda: len(workers_of(process.pid)) == 1)
    (worker,) = workers_of(process.pid)
    os.kill(worker, signal.SIGKILL)
    start = time.monotonic()
    ended = process.wait(60)
    assert time.monotonic() - start < 30
    assert ended.code == 2
    assert "one of 2 workers was killed" in ended.err
    assert not alive(worker)
    assert not (tmp_path / "out").exists()
    assert narrowgauge(*words).code == 0


def workers_of(pid):
    """The processes that the fork server of a process has started."""
    return [p for p in descendants(pid) if p not in descendants(pid, depth=1)]

"""Workers: the same bytes whatever their number, memory and time apart; the options that choose documents."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.data import documents, prepare
from narrowgauge.data.preparation.document_filter import Options, is_held_out
from narrowgauge.data.preparation.worker_pool import ordered_map
from narrowgauge.errors import UserError
from support.fault_table import case


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Some chunks of JSON lines, long and short, some of them twice."""
    monkeypatch.setattr("narrowgauge.data.sources.byte_stream.CHUNK_BYTES", 1 << 15)
    rng = np.random.default_rng(0)
    words = ["steam", "coal", "rail", "gauge", "caf\u00e9", "<|endoftext|>", "valley\n\n"]
    with (tmp_path / "lines.jsonl").open("w", encoding="utf-8") as file:
        for i in range(1000):
            text = f"{i} " + " ".join(words[w] for w in rng.integers(0, len(words), 20 + i % 150))
            file.write(json.dumps({"text": text if i < 900 else f"twice {i % 50}"}) + "\n")
    return str(tmp_path / "lines.jsonl")


@pytest.mark.tier("thorough")  # real processes
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_the_same_bytes_whatever_the_number_of_workers(lines, tmp_path, tokenizer):
    made = [
        contents(
            prepare(lines, tokenizer, tmp_path / f"{n}", options=Options(dedup=True), workers=n).directory
        )
        for n in (1, 3)
    ]
    assert made[0] == made[1]
    assert set(made[0]) == {"manifest.json", "tokenizer.json", "train.bin", "val.bin"}


def test_documents_keep_their_order(lines, tmp_path):
    corpus = prepare(lines, "bytes", tmp_path / "out", workers=2)
    end = corpus.tokenizer.end_of_document
    texts = [document.text.encode() for document in documents(lines)]
    for part, count in ((corpus.train, 900), (corpus.val, 80)):
        cuts = [*np.flatnonzero(np.asarray(part) == end), len(part)]
        found = [bytes(np.asarray(part[a + 1 : b], np.uint8)) for a, b in pairwise(cuts)]
        assert len(found) > count * 0.8
        known = set(found)
        assert found == [text for text in texts if text in known]


def test_duplicates_go_if_they_are_to(lines, tmp_path):
    kept = prepare(lines, "bytes", tmp_path / "all").manifest
    assert (kept.train_documents + kept.val_documents, kept.duplicates) == (1000, 0)
    once = prepare(lines, "bytes", tmp_path / "once", options=Options(dedup=True)).manifest
    assert (once.train_documents + once.val_documents, once.duplicates) == (950, 50)
    assert once.request != kept.request
    assert once.digest != kept.digest


def test_a_larger_share_holds_out_the_same_and_more(lines, tmp_path):
    sides = {}
    for share in (0.02, 0.1, 0.15, 0.5):
        options = Options(val_fraction=share)
        facts = prepare(lines, "bytes", tmp_path / f"{share}", options=options).manifest
        sides[share] = facts.val_documents
        assert abs(facts.val_documents - 1000 * share) < 4 * (1000 * share) ** 0.5
    assert list(sides.values()) == sorted(sides.values())
    digests = [os.urandom(32) for _ in range(500)]
    for small, large in ((0.02, 0.1), (0.1, 0.15), (0.15, 0.5)):
        assert all(is_held_out(d, large) for d in digests if is_held_out(d, small))
    assert all(is_held_out(d, 0.1) == (int.from_bytes(d[:8], "big") % 10 == 0) for d in digests)


def test_another_corpus_is_not_overwritten_and_the_same_is_found(lines, tmp_path):
    prepare(lines, "bytes", tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepare(lines, "bytes", tmp_path / "out", workers=2)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(UserError, match="holds another corpus"):
        prepare(lines, "bytes", tmp_path / "out", options=Options(dedup=True))


def test_a_prepared_directory_is_a_source_with_its_own_tokenizer(lines, tmp_path):
    made = prepare(lines, "bpe-300", tmp_path / "out")
    for tokenizer in (None, "bpe-300", str(tmp_path / "out" / "tokenizer.json")):
        again = prepare(str(tmp_path / "out"), tokenizer)
        assert again.digest == made.digest
        assert np.array_equal(again.train, made.train)
    with pytest.raises(
        UserError, match=r"was prepared with tokenizer 'bpe-300', and data.tokenizer asks for"
    ):
        prepare(str(tmp_path / "out"), "bytes")
    with pytest.raises(UserError, match="is already prepared; train on it directly"):
        prepare(str(tmp_path / "out"), None, tmp_path / "twice")


def test_tokens_beyond_a_file_go_into_several(lines, tmp_path, monkeypatch):
    whole = prepare(lines, "bytes", tmp_path / "one")
    monkeypatch.setattr("narrowgauge.data.preparation.shard_writer.MOST_TOKENS", 100_000)
    corpus = prepare(lines, "bytes", tmp_path / "several")
    names = sorted(path.name for path in (tmp_path / "several").glob("*.bin"))
    assert names[:2] == ["train_000000.bin", "train_000001.bin"]
    assert len(corpus.train) == len(whole.train) == corpus.manifest.train_tokens
    for start, stop in [(0, 10), (99_990, 100_010), (0, len(whole.train)), (5, 5)]:
        assert np.array_equal(corpus.train[start:stop], whole.train[start:stop])


@dataclass(frozen=True)
class Square:
    """Work that can fail, or end its process, at a number."""

    fails_at: int = -1
    dies_at: int = -1

    def __call__(self) -> Callable[[int], int]:
        return partial(_square, self, os.getpid())


def _square(self, home, number):
    if number == self.fails_at:
        raise UserError(f"{number} will not do")
    if number == self.dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.001 * (number % 5))
    return number * number


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_results_keep_the_order_and_items_are_read_as_they_are_needed(workers):
    read = []

    def items():
        for number in range(600):
            read.append(number)
            yield number

    results = ordered_map(Square(), items(), workers)
    assert next(results) == 0
    assert len(read) < 30 * workers
    assert list(results) == [n * n for n in range(1, 600)]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_of_the_work_comes_in_its_turn(workers):
    results = ordered_map(Square(fails_at=20), range(1000), workers)
    got = []
    with pytest.raises(UserError, match="20 will not do"):
        got.extend(results)
    assert got == [n * n for n in range(20)]


CHILD = """
import sys
from pathlib import Path
from narrowgauge.data import prepare

def stop(stage, done, total, facts):
    if stage == "encode":
        print("here", flush=True)
        sys.stdin.read()

if __name__ == "__main__":
    prepare(sys.argv[1], "bytes", Path(sys.argv[2]), stop, workers=2)
"""


def below(root):
    """The processes started by `root`, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    for _ in parents:
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {root}


@pytest.mark.tier("thorough")  # real processes
@case("F4", tier="quick")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes in")
def test_killed_it_leaves_no_process_and_the_next_makes_the_same_bytes(lines, tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py"), lines, str(tmp_path / "place" / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        children = below(process.pid)
        process.kill()
    assert children
    assert not (tmp_path / "place" / "out").exists()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}/cmdline").exists()]
    undisturbed = prepare(lines, "bytes", tmp_path / "undisturbed").directory
    assert contents(prepare(lines, "bytes", tmp_path / "place" / "out").directory) == contents(undisturbed)

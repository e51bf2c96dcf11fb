"""Preparation: the same bytes always, whole or not at all, and nothing foreign or damaged is used."""

import os
import resource
import shutil
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.data import Options, documents, open_corpus, prepare, train_bpe
from narrowgauge.data.preparation.document_filter import SeenTexts
from narrowgauge.errors import UserError
from narrowgauge.files import cache_directory

FILES = ["manifest.json", "tokenizer.json", "train.bin", "val.bin"]


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def split_at(tokens, end):
    """The documents in a row of tokens, each begun by the id `end`."""
    starts = [*np.flatnonzero(np.asarray(tokens) == end), len(tokens)]
    assert starts[0] == 0
    return [np.asarray(tokens[a + 1 : b]) for a, b in pairwise(starts)]


@pytest.mark.parametrize("name", ["bytes", "bpe-300"])
def test_the_two_parts_are_the_documents_and_a_tenth_is_held_out(source, name):
    corpus = prepare(source, name)
    end = corpus.tokenizer.end_of_document
    train, val = (
        [corpus.tokenizer.decode(ids) for ids in split_at(t, end)] for t in (corpus.train, corpus.val)
    )
    texts = [document.text for document in documents(source)]
    assert sorted(train + val) == sorted(texts)
    assert [text for text in texts if text in train] == train  # in the order of the source
    assert 1 <= len(val) <= 10
    facts = corpus.manifest
    assert (facts.train_documents, facts.val_documents) == (len(train), len(val))
    assert (facts.train_tokens, facts.val_tokens) == (len(corpus.train), len(corpus.val))
    assert (facts.vocab_size, facts.dtype) == (corpus.tokenizer.vocab_size, "uint16")
    assert sorted(os.listdir(corpus.directory)) == FILES


def test_the_tokenizer_learns_nothing_from_held_out_documents(source):
    held_out = {d.name for d in documents(source)} - train_names(source, prepare(source, "bytes"))
    assert held_out
    training = [d.text for d in documents(source) if d.name not in held_out]
    everything = [d.text for d in documents(source)]
    learnt = prepare(source, "bpe-300").tokenizer.to_json()
    assert learnt == train_bpe(training, 300).to_json()
    assert learnt != train_bpe(everything, 300).to_json()


def train_names(source, corpus):
    train = {corpus.tokenizer.decode(ids) for ids in split_at(corpus.train, corpus.tokenizer.end_of_document)}
    return {d.name for d in documents(source) if d.text in train}


def test_a_document_stays_on_its_side_when_others_come_and_go(source):
    before = train_names(source, prepare(source, "bytes"))
    for name in ["00.txt", "17.txt", "39.txt"]:
        Path(source, name).unlink()
    Path(source, "new.txt").write_text("something new under the sun")
    assert train_names(source, prepare(source, "bytes")) - {"new.txt"} == before - {
        "00.txt",
        "17.txt",
        "39.txt",
    }


@pytest.mark.parametrize("count", range(2, 12))
def test_there_is_a_document_on_each_side(tmp_path, count):
    (tmp_path / "few").mkdir()
    for i in range(count):
        (tmp_path / "few" / f"{i}.txt").write_text(f"text {i}")
    corpus = prepare(str(tmp_path / "few"), "bytes")
    assert corpus.manifest.train_documents >= 1
    assert corpus.manifest.val_documents >= 1
    assert corpus.manifest.train_documents + corpus.manifest.val_documents == count


@pytest.mark.parametrize("name", ["bytes", "bpe-300"])
def test_the_same_bytes_twice_in_different_places(source, tmp_path, name):
    here, there = prepare(source, name, tmp_path / "a" / "deep"), prepare(source, name, tmp_path / "b")
    shutil.copytree(source, tmp_path / "elsewhere" / "text")
    moved = prepare(str(tmp_path / "elsewhere" / "text"), name)
    assert contents(here.directory) == contents(there.directory)
    for file in FILES[1:]:
        assert contents(moved.directory)[file] == contents(here.directory)[file]
    assert here.digest == there.digest == moved.digest


def test_it_is_made_once_and_found_afterwards(source, cache):
    stages = []

    def watch(stage, done, total, facts):
        stages.append(stage)
        assert done > 0
        assert total >= done

    first = prepare(source, "bpe-300", progress=watch)
    assert list(dict.fromkeys(stages)) == [
        "digest",
        "read",
        "learn",
        "encode",
    ]
    assert first.directory == cache / f"text-bpe-300-{first.manifest.request[:12]}"
    made = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    stages.clear()
    again = prepare(source, "bpe-300", progress=watch)
    assert set(stages) == {"digest"}
    assert again.directory == first.directory
    assert {path: path.stat().st_mtime_ns for path in first.directory.iterdir()} == made
    assert os.listdir(cache) == [first.directory.name]


def test_a_changed_document_or_tokenizer_makes_another_corpus(source):
    before = prepare(source, "bytes")
    assert prepare(source, "bpe-300").digest != before.digest
    path = Path(source, "05.txt")
    path.write_bytes(path.read_bytes().replace(b"coal", b"Coal", 1))
    after = prepare(source, "bytes")
    assert after.digest != before.digest
    assert after.directory != before.directory


def test_a_tokenizer_file_can_be_used_and_its_content_counts(source, tmp_path):
    learnt = prepare(source, "bpe-300")
    shutil.copy(learnt.directory / "tokenizer.json", tmp_path / "mine.json")
    corpus = prepare(source, str(tmp_path / "mine.json"))
    assert np.array_equal(corpus.train, learnt.train)
    shutil.copy(prepare(source, "bpe-290").directory / "tokenizer.json", tmp_path / "mine.json")
    assert prepare(source, str(tmp_path / "mine.json")).digest != corpus.digest


def test_an_empty_directory_is_filled_and_a_foreign_one_is_left_alone(source, tmp_path):
    (tmp_path / "empty").mkdir()
    assert prepare(source, "bytes", tmp_path / "empty").directory == tmp_path / "empty"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(
        UserError, match=r"home is not empty and has no manifest\.json, so it is not a prepared"
    ):
        prepare(source, "bytes", tmp_path / "home")
    with pytest.raises(UserError, match="letter is a file; delete it or name another"):
        prepare(source, "bytes", tmp_path / "home" / "letter")
    assert contents(tmp_path / "home") == {"letter": b"dear"}


def test_a_directory_with_another_corpus_is_refused_by_both_names(source, tmp_path):
    prepare(source, "bytes", tmp_path / "out")
    with pytest.raises(
        UserError, match=r"out holds another corpus \(.*text with bytes, request .*delete it or name"
    ):
        prepare(source, "bpe-300", tmp_path / "out")


def test_one_document_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "short.txt").write_text("only this")
    with pytest.raises(
        UserError,
        match="is a single document, not long enough for pieces of 4,096 characters, and a corpus needs two",
    ):
        prepare(str(tmp_path / "short.txt"), "bytes")


def test_a_source_that_changes_while_it_is_read_is_refused(source, cache):
    def meddle(stage, done, total, facts):
        if stage == "learn":
            Path(source, "39.txt").write_text("not what it was")

    with pytest.raises(UserError, match=r"changed while it was read, at 39\.txt; prepare it again"):
        prepare(source, "bpe-300", progress=meddle)
    assert os.listdir(cache) == []


def test_a_mistyped_tokenizer_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match="unknown tokenizer 'bpe'"):
        prepare(str(tmp_path / "no such source"), "bpe")


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("NARROWGAUGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "narrowgauge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "narrowgauge"


@pytest.mark.tier("thorough")
def test_the_standard_library_is_prepared_and_found_again_quickly():
    start = time.perf_counter()
    corpus = prepare("stdlib", "bytes")
    made = time.perf_counter()
    assert len(corpus.train) > 5e6
    assert len(corpus.val) > 1e5
    assert made - start < 40
    open_corpus(corpus.directory)
    assert time.perf_counter() - made < 2


def test_a_prepared_corpus_refuses_options_it_was_not_made_with(tmp_path):
    """They were taken and did nothing: `prepare CORPUS --layout llmc --dedup` left out no duplicate."""
    (tmp_path / "a.txt").write_text("some words in a row\n\n" * 3000)
    made = Options(val_fraction=0.2, dedup=True)
    corpus = prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "corpus", options=made)
    for options in (None, Options(), made):
        assert prepare(str(tmp_path / "corpus"), options=options).digest == corpus.digest
    for options, said in ((Options(val_fraction=0.5), "0.2"), (Options(text_key="body"), "text")):
        with pytest.raises(UserError, match=rf"was prepared with \w+ = {said}, not .*; leave"):
            prepare(str(tmp_path / "corpus"), options=options)


def test_a_full_disk_under_the_digests_of_duplicates_is_an_error_of_the_system(tmp_path, monkeypatch):
    """sqlite has separate errors, and one of them was a traceback."""
    monkeypatch.setattr("narrowgauge.data.preparation.document_filter._CACHE_KIB", 64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))  # as if the disk ended there
    try:
        with (
            SeenTexts(tmp_path / "seen") as seen,
            pytest.raises(OSError, match="cannot store the digests for --dedup: "),
        ):
            list(map(seen.add, (number.to_bytes(16, "big") for number in range(1 << 17))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

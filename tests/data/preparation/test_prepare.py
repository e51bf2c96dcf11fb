"""Preparation: the same bytes always, whole or not at all, and nothing foreign or damaged is used."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.reading import contents, documents_in, full_disk, names, texts, write
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import Options, prepare, train_bpe
from narrowgauge.trainer.data.preparation.prepare import seen_texts

FILES = ["manifest.json", "tokenizer.json", "train.bin", "val.bin"]


def train_texts(corpus):
    end = corpus.tokenizer.end_of_document
    return [corpus.tokenizer.decode(ids) for ids in documents_in(corpus.train.streams[0], end)]


@pytest.mark.parametrize("name", ["bytes", "bpe-300"])
def test_the_two_parts_are_the_documents_and_a_tenth_is_held_out(source, name):
    corpus = prepare(source, name)
    train, end = train_texts(corpus), corpus.tokenizer.end_of_document
    val = [corpus.tokenizer.decode(ids) for ids in documents_in(corpus.val.streams[0], end)]
    whole = texts(source)
    assert sorted(train + val) == sorted(whole)
    assert [text for text in whole if text in train] == train  # in the order of the source
    assert 1 <= len(val) <= 10
    facts = corpus.manifest
    assert (facts.train_documents, facts.val_documents) == (len(train), len(val))
    assert (facts.train_tokens, facts.val_tokens) == (len(corpus.train), len(corpus.val))
    assert (facts.vocab_size, facts.dtype) == (corpus.tokenizer.vocab_size, "uint16")
    assert sorted(os.listdir(corpus.directory)) == FILES


def test_the_tokenizer_learns_nothing_from_held_out_documents(source):
    training = train_texts(prepare(source, "bytes"))
    learnt = prepare(source, "bpe-300").tokenizer.to_json()
    assert learnt == train_bpe(training, 300).to_json()
    assert learnt != train_bpe(texts(source), 300).to_json()


def test_there_is_a_document_on_each_side(tmp_path):
    write(tmp_path / "few" / "0.txt", "text 0")
    words = "is a single document, not long enough for pieces of 4,096 characters, and a corpus needs two"
    with pytest.raises(UserError, match=words):
        prepare(str(tmp_path / "few" / "0.txt"), "bytes")
    for count in range(2, 12):
        write(tmp_path / "few" / f"{count}.txt", f"text {count}")
        facts = prepare(str(tmp_path / "few"), "bytes").manifest
        assert min(facts.train_documents, facts.val_documents) >= 1
        assert facts.train_documents + facts.val_documents == count


def test_the_same_bytes_wherever_and_another_text_or_tokenizer_makes_another_corpus(source, tmp_path):
    learnt, other = prepare(source, "bpe-300"), prepare(source, "bpe-290")
    shutil.copytree(source, tmp_path / "elsewhere" / "text")
    moved = prepare(str(tmp_path / "elsewhere" / "text"), "bpe-300", tmp_path / "deep" / "a")
    for file in FILES[1:]:
        assert contents(moved.directory)[file] == contents(learnt.directory)[file]
    assert moved.digest == learnt.digest
    shutil.copy(learnt.directory / "tokenizer.json", tmp_path / "mine.json")
    mine = prepare(source, str(tmp_path / "mine.json"))
    assert np.array_equal(mine.train.streams[0][:], learnt.train.streams[0][:])
    shutil.copy(other.directory / "tokenizer.json", tmp_path / "mine.json")
    theirs = prepare(source, str(tmp_path / "mine.json"))
    path = Path(source, "05.txt")
    path.write_bytes(path.read_bytes().replace(b"coal", b"Coal", 1))
    changed = prepare(source, "bpe-300")
    assert len({corpus.digest for corpus in (learnt, other, mine, theirs, changed)}) == 5


def test_it_is_made_once_and_found_afterwards(source, cache):
    stages = []

    def watch(stage, done, total, facts):
        stages.append(stage)
        assert 0 < done <= total

    first = prepare(source, "bpe-300", progress=watch)
    assert list(dict.fromkeys(stages)) == ["digest", "read", "learn", "encode"]
    assert first.directory == cache / f"text-bpe-300-{first.manifest.request[:12]}"
    stages.clear()
    assert prepare(source, "bpe-300", progress=watch).directory == first.directory
    assert set(stages) == {"digest"}
    assert os.listdir(cache) == [first.directory.name]


def test_where_a_corpus_may_go(source, tmp_path):
    (tmp_path / "empty").mkdir()
    assert prepare(source, "bytes", tmp_path / "empty").directory == tmp_path / "empty"
    write(tmp_path / "home" / "letter", "dear")
    for tokenizer, out, says in (
        ("bytes", "home", r"home is not empty and has no manifest\.json, so it is not a prepared"),
        ("bytes", "home/letter", "letter is a file; delete it or name another"),
        ("bytes", "home/letter/out", r"cannot write the corpus to .*/letter is a file; delete it"),
        ("bpe-300", "empty", r"empty holds another corpus \(.*text with bytes, request .*delete it or name"),
        ("bpe", "new", "unknown tokenizer 'bpe'"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(source if tokenizer != "bpe" else "no such source", tokenizer, tmp_path / out)
    assert contents(tmp_path / "home") == {"letter": b"dear"}


def test_a_source_that_changes_while_it_is_read_is_refused(source, cache):
    def meddle(stage, done, total, facts):
        if stage == "learn":
            write(Path(source, "39.txt"), "not what it was")

    with pytest.raises(UserError, match=r"changed while it was read, at 39\.txt; prepare it again"):
        prepare(source, "bpe-300", progress=meddle)
    assert os.listdir(cache) == []


@pytest.mark.tier("thorough")
def test_the_standard_library_is_in_order_without_its_tests():
    found = names("stdlib")
    assert found == sorted(found)
    assert {"argparse.py", "json/decoder.py"} < set(found)
    assert not [name for name in found if {"test", "site-packages", "idlelib"} & set(name.split("/"))]


def test_a_prepared_corpus_is_a_source_with_its_own_tokenizer_and_options(tmp_path):
    """They were taken and did nothing: `prepare CORPUS --layout llmc --dedup` left out no duplicate."""
    path, out = write(tmp_path / "a.txt", "some words in a row\n\n" * 3000), str(tmp_path / "corpus")
    made = Options(val_fraction=0.2, dedup=True)
    corpus = prepare(str(path), "bpe-260", tmp_path / "corpus", options=made)
    for options in (None, Options(), made):
        assert prepare(out, options=options).digest == corpus.digest
    for tokenizer in ("bpe-260", f"{out}/tokenizer.json"):
        assert np.array_equal(prepare(out, tokenizer).train.streams[0][:], corpus.train.streams[0][:])
    for words, options, says in (
        ((), Options(val_fraction=0.5), r"was prepared with val_fraction = 0\.2, not .*; leave"),
        ((), Options(text_key="body"), "was prepared with text_key = text, not .*; leave"),
        (("bytes",), None, "was prepared with tokenizer 'bpe-260', and data.tokenizer asks"),
        ((None, tmp_path / "twice"), None, "is already prepared; train on it directly"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(out, *words, options=options)


def test_a_full_disk_under_the_digests_of_duplicates_is_an_error_of_the_system(tmp_path, monkeypatch):
    """sqlite has separate errors, and one of them was a traceback."""
    monkeypatch.setattr("narrowgauge.trainer.data.preparation.prepare._CACHE_KIB", 64)
    digests = (number.to_bytes(16, "big") for number in range(1 << 17))
    says = "cannot store the digests for --dedup: "
    with full_disk(1 << 18), seen_texts(tmp_path / "seen") as is_new, pytest.raises(OSError, match=says):
        list(map(is_new, digests))

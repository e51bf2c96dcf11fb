"""What a run trains on: one source or several, each of any kind, and one tokenizer for all."""

import shutil

import numpy as np
import pytest

from narrowgauge.data import (
    ids_tokenizer,
    open_data,
    prepare,
    shares_of,
    split_sources,
    train_bpe,
    write_token_file,
)
from narrowgauge.errors import UserError


def test_text_is_prepared_and_a_prepared_corpus_is_opened(source, tmp_path):
    corpus = prepare(source, "bpe-300", tmp_path / "out")
    text, prepared = open_data(source, "bpe-300"), open_data(str(tmp_path / "out"))
    for data in (text, prepared, open_data(str(tmp_path / "out"), "bpe-300")):
        assert data.digest == corpus.digest
        assert np.array_equal(data.train.streams[0][:], corpus.train)
        assert np.array_equal(data.val.streams[0][:], corpus.val)
        assert data.train.streams[0].boundaries == (0,)
        assert data.tokenizer.digest == corpus.tokenizer.digest


def test_a_tokenizer_that_differs_from_the_manifests_is_refused_by_name(source, tmp_path):
    prepare(source, "bpe-300", tmp_path / "out")
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    shutil.copy(tmp_path / "out" / "tokenizer.json", same)
    train_bpe(["other words"], 270).save(other)
    assert open_data(str(tmp_path / "out"), str(same)).tokenizer.vocab_size == 300
    with pytest.raises(UserError, match=r"tokenizer file 'nothing.json' does not exist"):
        open_data(str(tmp_path / "out"), "nothing.json")
    for name in (str(other), "bytes", "bpe-301"):
        words = f"out was prepared with tokenizer 'bpe-300', and data.tokenizer asks for '{name}'; leave"
        with pytest.raises(UserError, match=words):
            open_data(str(tmp_path / "out"), name)


def test_a_manifest_of_someone_else_does_not_make_a_corpus(source, tmp_path):
    shutil.copytree(source, tmp_path / "mine")
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "not ours"}')
    with pytest.warns(UserWarning, match=r"leaves out 1 of 41 files .*: manifest\.json"):
        assert open_data(str(tmp_path / "mine"), "bytes").tokenizer.is_bytes


def test_several_sources_have_weights_and_one_tokenizer(source, tmp_path):
    first = open_data(source, "bpe-300")
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_token_file(tokens / "x.bin", [first.train.streams[0][:4000]], 300)
    first.tokenizer.save(tokens / "tokenizer.json")
    shutil.copytree(source, tmp_path / "more")
    (tmp_path / "more" / "extra.txt").write_text("narrow train valley signal\n" * 50)
    names = f"{source},{tokens}, {tmp_path / 'more'}"
    with pytest.raises(UserError, match="tokenizer 'bpe-300' would be trained on text"):
        open_data(names, "bpe-300")
    tokenizer = str(tokens / "tokenizer.json")
    data = open_data(names, tokenizer, (0.5, 0.25, 0.25))
    assert data.train.shares == (32768, 16384, 16384)
    assert {len(part.streams) for part in (data.train, data.val)} == {3}
    assert data.tokenizer.digest == first.tokenizer.digest
    by_size = open_data(names, tokenizer)
    assert by_size.train.shares == shares_of([len(stream) for stream in by_size.train.streams])
    assert by_size.digest == data.digest  # the weights are in the configuration
    assert (
        open_data(f"{tokens},{source}", tokenizer).digest != open_data(f"{source},{tokens}", tokenizer).digest
    )


def test_texts_share_the_tokenizer_that_the_first_taught(source, tmp_path):
    shutil.copytree(source, tmp_path / "more")
    for i in range(20):
        (tmp_path / "more" / f"extra-{i}.txt").write_text(f"{i} quizzically muddled hyphenation\n" * 50)
    data = open_data(f"{source},{tmp_path / 'more'}", "bpe-300")
    assert data.tokenizer.digest == open_data(source, "bpe-300").tokenizer.digest
    assert data.tokenizer.digest != open_data(str(tmp_path / "more"), "bpe-300").tokenizer.digest


def test_different_tokenizers_are_refused_by_name(source, tmp_path):
    prepare(source, "bytes", tmp_path / "one")
    prepare(source, "bpe-300", tmp_path / "two")
    words = r"one' and '.*two' have different tokenizers \(sha256 .* and .*\); make both with the same one"
    with pytest.raises(UserError, match=words):
        open_data(f"{tmp_path / 'one'},{tmp_path / 'two'}")
    write_token_file(tmp_path / "x.bin", [np.arange(1000) % 90], 300)
    with pytest.raises(UserError, match="have different tokenizers"):
        open_data(f"{tmp_path / 'x.bin'},{source}")


@pytest.mark.parametrize(
    ("source", "weights", "words"),
    [
        ("a,b", (1.0,), "data.weights has 1 numbers, and data.source 'a,b' names 2; give one weight"),
        ("a", (1.0, 2.0), "data.weights has 2 numbers, and data.source 'a' names 1"),
        ("a,,b", (), "data source 'a,,b' has an empty name between commas"),
        ("a,b", (1.0, 0.0), r"data.weights = \[1.0, 0.0\] must be positive; leave out a source of no weight"),
        ("a,b", (1.0, float("inf")), "must be positive"),
    ],
)
def test_sources_and_weights_that_do_not_fit_are_refused(source, weights, words):
    with pytest.raises(UserError, match=words):
        split_sources(source, weights)


def test_a_path_with_a_comma_is_one_source(tmp_path):
    (tmp_path / "a,b").mkdir()
    assert split_sources(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")]
    assert split_sources("a, b") == ["a", "b"]


def test_ids_as_they_are_take_no_text(source, tmp_path):
    ids_tokenizer(300, 0).save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="expects ids as text"):
        open_data(source, str(tmp_path / "tokenizer.json"))

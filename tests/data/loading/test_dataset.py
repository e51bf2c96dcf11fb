"""What a run trains on: one source or several, each of any kind, and one tokenizer for all."""

import shutil

import numpy as np
import pytest

from data.reading import write
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import (
    ids_tokenizer,
    open_data,
    prepare,
    shares_of,
    split_sources,
    train_bpe,
    write_token_file,
)


def test_tokenizers_that_differ_are_refused_by_name(source, tmp_path):
    out, same, other = (str(tmp_path / name) for name in ("out", "same.json", "other.json"))
    prepare(source, "bpe-300", tmp_path / "out")
    shutil.copy(tmp_path / "out" / "tokenizer.json", same)
    train_bpe(["other words"], 270).save(tmp_path / "other.json")
    assert open_data(out, same).tokenizer.vocab_size == 300
    ids_tokenizer(300, 0).save(tmp_path / "ids.json")
    prepare(source, "bytes", tmp_path / "one")
    write_token_file(tmp_path / "x.bin", [np.arange(1000) % 90], 300)
    asks = "out was prepared with tokenizer 'bpe-300', and data.tokenizer asks for '{}'; leave"
    different = r"have different tokenizers \(sha256 .* and .*\); make both with the same one"
    for words, says in (
        ((out, "nothing.json"), "tokenizer file 'nothing.json' does not exist"),
        *(((out, name), asks.format(name)) for name in (other, "bytes", "bpe-301")),
        ((f"{tmp_path / 'one'},{out}",), f"one' and '.*out' {different}"),
        ((f"{tmp_path / 'x.bin'},{source}",), different),
        ((source, str(tmp_path / "ids.json")), "expects ids as text"),
    ):
        with pytest.raises(UserError, match=says):
            open_data(*words)


def test_a_manifest_of_someone_else_does_not_make_a_corpus(source, tmp_path):
    shutil.copytree(source, tmp_path / "mine")
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "not ours"}')
    with pytest.warns(UserWarning, match=r"leaves out 1 of 41 files .*: manifest\.json"):
        assert open_data(str(tmp_path / "mine"), "bytes").tokenizer.is_bytes


@pytest.mark.tier("thorough")
def test_several_sources_have_weights_and_one_tokenizer(source, tmp_path):
    first = open_data(source, "bpe-300")
    tokens, more = tmp_path / "tokens", tmp_path / "more"
    tokens.mkdir()
    write_token_file(tokens / "x.bin", [first.train.streams[0][:4000]], 300)
    first.tokenizer.save(tokens / "tokenizer.json")
    write(more / "extra.txt", "quizzically muddled hyphenation\n\n" * 1000)
    names, tokenizer = f"{source},{tokens}", str(tokens / "tokenizer.json")
    data, by_size = open_data(names, tokenizer, (0.75, 0.25)), open_data(names, tokenizer)
    assert data.train.shares == (49152, 16384)
    assert by_size.train.shares == shares_of([len(stream) for stream in by_size.train.streams])
    assert by_size.digest == data.digest  # the weights are in the configuration
    assert open_data(f"{tokens},{source}", tokenizer).digest != data.digest
    # Texts share the tokenizer that the first taught.
    assert open_data(f"{source},{more}", "bpe-300").tokenizer.digest == first.tokenizer.digest


def test_names_and_weights_of_sources(tmp_path):
    (tmp_path / "a,b").mkdir()
    assert split_sources(str(tmp_path / "a,b")) == [str(tmp_path / "a,b")], "a path with a comma is one"
    assert split_sources("a, b") == ["a", "b"]
    positive = r"data.weights = \[1.0, 0.0\] must be positive; leave out a source of no weight"
    for source, weights, words in (
        ("a,b", (1.0,), "data.weights has 1 numbers, and data.source 'a,b' names 2; give one weight"),
        ("a", (1.0, 2.0), "data.weights has 2 numbers, and data.source 'a' names 1"),
        ("a,,b", (), "data source 'a,,b' has an empty name between commas"),
        ("a,b", (1.0, 0.0), positive),
        ("a,b", (1.0, float("inf")), "must be positive"),
    ):
        with pytest.raises(UserError, match=words):
            split_sources(source, weights)

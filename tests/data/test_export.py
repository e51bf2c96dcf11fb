"""Tokens in other programs' layouts, and back."""

import os

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import export_tokens, open_data
from narrowgauge.trainer.data.token_files.layouts import open_megatron

MEGATRON = [f"text_{part}_document.{end}" for part in ("train", "val") for end in ("bin", "idx")]


def test_both_layouts_bring_back_every_document(source, tmp_path):
    data = open_data(source, "bpe-300")
    for layout in ("llmc", "megatron"):
        export_tokens(data, layout, tmp_path / layout)
    shards = ["text_train_000000.bin", "text_val_000000.bin", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path / "llmc")) == shards
    assert sorted(os.listdir(tmp_path / "megatron")) == [*MEGATRON, "tokenizer.json"]
    end = data.tokenizer.end_of_document
    llmc, megatron = open_data(str(tmp_path / "llmc")), open_data(str(tmp_path / "megatron"))
    for part in ("train", "val"):
        (ours,), (theirs,), (indexed,) = (getattr(each, part).streams for each in (data, llmc, megatron))
        assert np.array_equal(theirs[:], ours[:])  # ours are llm.c's: the id before each document
        assert np.array_equal(indexed[:], [*ours[1:], end])
        assert len(indexed.starts) == (ours[:] == end).sum()
        for one, other in zip(ours.documents(), indexed.documents(), strict=True):
            assert np.array_equal(one, other)
    assert megatron.tokenizer.digest == data.tokenizer.digest


def test_a_named_pair_of_megatrons_holds_all_documents_the_held_out_ones_last(source, tmp_path):
    data = open_data(source, "bytes")
    export_tokens(data, "megatron", tmp_path / "one", "wikipedia_text_document")
    names = ["tokenizer.json", "wikipedia_text_document.bin", "wikipedia_text_document.idx"]
    assert sorted(os.listdir(tmp_path / "one")) == names
    pair = open_megatron(tmp_path / "one" / names[1])
    documents = [document for part in (data.train, data.val) for document in part.streams[0].documents()]
    for one, other in zip(np.split(pair.tokens, pair.starts[1:]), documents, strict=True):
        assert np.array_equal(one, [*other, 256])


def test_what_cannot_be_exported_is_refused_before_anything_is_written(source, tmp_path):
    data = open_data(source, "bytes")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for words, says in (
        (("megatronn", tmp_path / "x"), "unknown token layout 'megatronn'; the nearest is 'megatron'"),
        (("llmc", tmp_path / "x", "../x"), r"--name '\.\./x' begins the names of files in --out; use only"),
        (("llmc", tmp_path / "full"), "cannot write tokens to .*full: it is not an empty directory"),
    ):
        with pytest.raises(UserError, match=says):
            export_tokens(data, *words)
    assert not (tmp_path / "x").exists()

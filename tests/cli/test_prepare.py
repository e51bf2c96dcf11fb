"""`prepare` as a user meets it: what it prints, what it leaves, and what can be trained on afterwards."""

import json
import os
from pathlib import Path

import pytest


@pytest.mark.tier("thorough")  # the README's lines prepare, train and continue
def test_text_is_prepared_and_trained_on(narrowgauge, line, text, tmp_path, look):
    ended = narrowgauge(
        "prepare", text, "--out", tmp_path / "corpus", "--tokenizer", "bytes", "--workers", "2"
    )
    assert ended.code == 0, ended.err
    assert "data: encode ..." in ended.out
    facts = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    assert f"{facts['train_documents']:,} documents" in ended.out
    assert f"{facts['train_tokens']:,} tokens" in ended.out
    assert f"train on it: narrowgauge train --data {tmp_path / 'corpus'}" in ended.out
    assert [len(file["sha256"]) for file in facts["files"]] == [64] * 12

    words = line({"data.source": str(tmp_path / "corpus")})
    without = words.index("--data.tokenizer")
    del words[without : without + 2]
    prepared = narrowgauge(*words, "--out", tmp_path / "a")
    assert prepared.code == 0, prepared.err
    direct = narrowgauge(*line(), "--out", tmp_path / "b")
    assert direct.code == 0, direct.err
    assert look(tmp_path / "a").column("loss") == look(tmp_path / "b").column("loss")

    other = narrowgauge(*line({"data.source": str(tmp_path / "corpus"), "data.tokenizer": "bpe-300"}))
    assert other.code == 2
    assert "was prepared with tokenizer 'bytes', and data.tokenizer asks for 'bpe-300'" in other.err


@pytest.mark.tier("thorough")
def test_token_files_of_others_train_as_ours(narrowgauge, line, text, tmp_path, look):
    """llm.c's have the end-of-document id where ours have it, so every token is the same."""
    prepare = ("prepare", text, "--tokenizer", "bytes", "--out")
    for layout in ("llmc", "megatron"):
        ended = narrowgauge(*prepare, tmp_path / layout, "--layout", layout)
        assert ended.code == 0, ended.err
        words = line({"data.source": str(tmp_path / layout)})
        trained = narrowgauge(*words, "--out", tmp_path / f"{layout}-run")
        assert trained.code == 0, trained.err
    direct = narrowgauge(*line(), "--out", tmp_path / "direct")
    assert direct.code == 0, direct.err
    assert look(tmp_path / "llmc-run").column("loss") == look(tmp_path / "direct").column("loss")
    assert (tmp_path / "megatron" / "text_train_document.idx").is_file()


def test_bad_lines_stop_it_or_are_set_aside(narrowgauge, refused, tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "corpus"
    source.write_text("".join(f'{{"body": "line {i % 190}"}}\n' for i in range(200)) + '{"body": "cut\n')
    common = ("prepare", source, "--out", out, "--tokenizer", "bytes", "--text-key", "body")
    refused(narrowgauge(*common), f"{source}:201 is not JSON", "--tolerant")
    assert not out.exists()
    refused(narrowgauge(*common, "--tolerant", "0.001"), "1 of 201 records", "(0.5%)")
    ended = narrowgauge(*common, "--tolerant", "--dedup", "--val-fraction", "0.5")
    assert ended.code == 0, ended.err
    assert "left out 10 duplicates" in ended.out
    assert f"set aside 1 records: {out / 'rejected.jsonl'}" in ended.out
    facts = json.loads((out / "manifest.json").read_text())
    assert facts["train_documents"] + facts["val_documents"] == 190
    assert 60 < facts["val_documents"] < 130
    assert os.listdir(tmp_path) in (["a.jsonl", "corpus"], ["corpus", "a.jsonl"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "0"], "--workers 0 must be at least 1"),
        (["--workers", "many"], "'many' is not a whole number"),
        (["--val-fraction", "1"], "held-out share 1.0 must be between 0 and 1"),
        (["--tolerant", "2"], "tolerated share 2.0 must be between 0 and 1"),
        (["--layout", "mega"], "unknown layout 'mega'; the nearest is 'megatron'"),
        (["--tokenizer", "bpe"], "unknown tokenizer 'bpe'"),
        (["--dedupe"], "unknown option '--dedupe'; the nearest is '--dedup'"),
    ],
)
def test_a_mistake_is_one_sentence(narrowgauge, refused, text, tmp_path, words, says):
    refused(narrowgauge("prepare", text, "--out", tmp_path / "out", *words), says)
    assert not Path(tmp_path, "out").exists()


def test_out_is_needed(narrowgauge, refused, text):
    refused(narrowgauge("prepare", text), "--out")

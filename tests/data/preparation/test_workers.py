"""Workers: the same bytes whatever their number, memory and time apart; the options that choose documents."""

import json

import numpy as np
import pytest

from data.reading import contents, documents_in, texts
from narrowgauge.trainer.data import prepare
from narrowgauge.trainer.data.preparation.prepare import Options, is_held_out

WORDS = ["steam", "coal", "rail", "gauge", "caf\u00e9", "<|endoftext|>", "valley\n\n"]


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Some chunks of JSON lines, long and short, some of them twice."""
    monkeypatch.setattr("narrowgauge.trainer.data.sources.records.CHUNK_BYTES", 1 << 15)
    rng = np.random.default_rng(0)
    with (tmp_path / "lines.jsonl").open("w", encoding="utf-8") as file:
        for i in range(1000):
            text = f"{i} " + " ".join(WORDS[w] for w in rng.integers(0, len(WORDS), 20 + i % 150))
            file.write(json.dumps({"text": text if i < 900 else f"twice {i % 50}"}) + "\n")
    return str(tmp_path / "lines.jsonl")


@pytest.mark.tier("thorough", keep=1)  # real processes
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_the_same_bytes_in_the_same_order_whatever_the_number_of_workers(lines, tmp_path, tokenizer):
    options = Options(dedup=True)
    made = [prepare(lines, tokenizer, tmp_path / f"{n}", options=options, workers=n) for n in (1, 2, 3)]
    assert contents(made[0].directory) == contents(made[1].directory) == contents(made[2].directory)
    assert made[0].manifest.duplicates == 50
    whole = texts(lines)
    for part, count in ((made[0].train, 900), (made[0].val, 80)):
        tokenizer = made[0].tokenizer
        found = [tokenizer.decode(ids) for ids in documents_in(part.streams[0], tokenizer.end_of_document)]
        assert len(found) > count * 0.8
        known = set(found)
        assert found == list(dict.fromkeys(text for text in whole if text in known))


def test_a_larger_share_holds_out_the_same_and_more():
    shares, digests = (0.02, 0.1, 0.15, 0.5), np.random.default_rng(0).bytes(32 * 500)
    for digest in (digests[i : i + 32] for i in range(0, len(digests), 32)):
        held_out = [is_held_out(digest, share) for share in shares]
        assert held_out == sorted(held_out)
        assert held_out[1] == (int.from_bytes(digest[:8], "big") % 10 == 0)


def test_tokens_beyond_a_file_go_into_several(lines, tmp_path, monkeypatch):
    whole = prepare(lines, "bytes", tmp_path / "one")
    monkeypatch.setattr("narrowgauge.trainer.data.preparation.prepare.MOST_TOKENS", 100_000)
    corpus = prepare(lines, "bytes", tmp_path / "several")
    names = sorted(path.name for path in (tmp_path / "several").glob("*.bin"))
    assert names[:2] == ["train_000000.bin", "train_000001.bin"]
    (parts,), (stream,) = corpus.train.streams, whole.train.streams
    assert len(parts) == len(stream) == corpus.manifest.train_tokens
    for start, stop in [(0, 10), (99_990, 100_010), (0, len(stream)), (5, 5)]:
        assert np.array_equal(parts[start:stop], stream[start:stop])

"""The names of tokenizers: what each stands for, and which are refused."""

import pytest

from narrowgauge.data import train_bpe
from narrowgauge.data.tokenization.names import make_tokenizer, tokenizer_identity
from narrowgauge.errors import UserError

TEXTS = ["def narrow(gauge):\n    return gauge * 2\n\n" * 20, "the railway runs narrow trains " * 30]


def test_names_choose_tokenizers(tmp_path):
    learnt = train_bpe(TEXTS, 300)
    learnt.save(tmp_path / "tokenizer.json")
    assert make_tokenizer("bytes", TEXTS).is_bytes
    assert make_tokenizer("bpe-260", TEXTS).vocab_size == 260
    for name in [str(tmp_path), str(tmp_path / "tokenizer.json")]:
        assert make_tokenizer(name, []).to_json() == learnt.to_json()
    assert tokenizer_identity("bpe-260") == "bpe-260"
    before = tokenizer_identity(str(tmp_path))
    train_bpe(TEXTS, 290).save(tmp_path / "tokenizer.json")
    assert tokenizer_identity(str(tmp_path)) != before


def test_a_name_that_is_none_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in {
        "byte": "unknown tokenizer 'byte'; the nearest is 'bytes'",
        "bpe-": "unknown tokenizer 'bpe-'; the nearest is 'bpe-",
        "bpe-256": "too small: 256 bytes and the end of a document need at least bpe-257",
        "mine.json": "tokenizer file 'mine.json' does not exist",
        "no/such": "tokenizer file 'no/such' does not exist",
    }.items():
        with pytest.raises(UserError, match=words):
            tokenizer_identity(name)

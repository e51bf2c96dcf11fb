"""Encoding by words gives the library's ids, and is used only where it does."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from narrowgauge.trainer.data.tokenization.tokenizer import load_tokenizer, train_bpe, word_encoder

TEXT = (
    "the cat's hat, the 12 hats they've\n\n  seen\tthere; caf\u00e9 1999 \u4e2d\u6587 \u00a0x <|endoftext|>"
)
BPE = train_bpe([TEXT] * 9, 400)
ENCODE = word_encoder(BPE, np.dtype("<u2"))
CHARACTERS = (
    " \n\t\r\v\f'sdmtvrela.,!1_<|>\u00e9\u4e2d\u00b2\u00bd\u0301"
    "\u3000\xa0\u2028\u2009\u1680\x1c\x85\u200b\ufeff\u180e"
)


@settings(max_examples=100)
@given(st.text(st.sampled_from(CHARACTERS), max_size=24) | st.text(max_size=24))
def test_the_ids_are_those_of_the_library(text):
    assert ENCODE(text).tolist() == BPE.encode(text)


def test_every_kind_of_white_space_at_every_place():
    for c in map(chr, [*range(0x400), *range(0x1680, 0x1810), *range(0x2000, 0x2070), 0x3000, 0xFEFF]):
        text = f"a!{c} b{c}!{c}\n{c}{c}x 1{c}"
        assert ENCODE(text).tolist() == BPE.encode(text), hex(ord(c))


def test_a_long_word_and_many_words_are_encoded_though_they_are_not_kept(monkeypatch):
    monkeypatch.setattr("narrowgauge.trainer.data.tokenization.tokenizer._MOST_WORDS", 2)
    encode = word_encoder(BPE, np.dtype("<u2"))
    for text in ["the cat saw the hat and the cat", "x" * 500]:
        assert encode(text).tolist() == encode(text).tolist() == BPE.encode(text)


#: Parts of a tokenizer under which words hang together.
PARTS = [
    ("normalizer", normalizers.Lowercase()),
    ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    ("added token", AddedToken("the hat")),
]


def test_a_tokenizer_whose_words_hang_together_is_left_to_the_library(tmp_path):
    for name, part in PARTS:
        library = Tokenizer.from_str(BPE.to_json())
        library.add_tokens([part]) if name == "added token" else setattr(library, name, part)
        library.save(str(tmp_path / "t.json"))
        assert word_encoder(load_tokenizer(tmp_path / "t.json"), np.dtype("<u2")) is None

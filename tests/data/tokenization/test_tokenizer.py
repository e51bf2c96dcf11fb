"""Tokenizers: exact round trips, special text that stays text, files that others can read."""

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import bytes_tokenizer, load_tokenizer, train_bpe
from narrowgauge.trainer.data.tokenization.tokenizer import make_tokenizer, tokenizer_identity
from support.llama2 import write_llama2

TEXTS = [
    "def narrow(gauge):\n    return gauge * 2\n\n" * 20,
    "the railway runs narrow trains " * 30,
    "caf\u00e9",
]
TOKENIZERS = {"bytes": bytes_tokenizer(), "bpe": train_bpe(TEXTS, 300)}

any_text = st.text(st.characters(exclude_categories=["Cs"]))
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@each_tokenizer
@settings(max_examples=100)
@given(text=any_text, prompt=any_text)
@example(text="<|endoftext|>", prompt="")
@example(text=" <|endoftext|><|endoftext|>\r\n\r\n\t\x00\u2028\ufeff e\u0301 \U0001f682", prompt="a")
def test_any_text_comes_back_exactly_and_never_ends_a_document(tokenizer, text, prompt):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.end_of_document not in ids
    assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]
    assert tokenizer.decode_after(tokenizer.encode(prompt), ids) == text


def test_the_blank_after_a_prompt_is_kept(tmp_path):
    tokenizer = write_llama2(tmp_path / "tokenizer.json")
    prompt, ids = tokenizer.encode("steam"), tokenizer.encode("steam train")
    new = ids[len(prompt) :]
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(new) == "train", "by itself it begins a text"
    assert tokenizer.decode_after(prompt, new) == " train"
    assert tokenizer.decode_after([1, *prompt], new) == " train"
    assert tokenizer.decode_after(prompt, []) == ""


def test_bytes_are_the_bytes_of_utf8():
    tokenizer = TOKENIZERS["bytes"]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.encode("h\u00e9\x00") == [0x68, 0xC3, 0xA9, 0]
    assert tokenizer.decode([0x68, 0xFF, 0x69, 256, 400]) == "h\ufffdi<|endoftext|>"


def test_bpe_learns_pairs_and_stops_where_the_text_has_no_more():
    tokenizer = TOKENIZERS["bpe"]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (300, 0)
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert len(set(tokenizer.encode(bytes(range(256)).decode("latin-1")))) > 128
    assert train_bpe(["ab ab"], 5000).vocab_size < 270


@each_tokenizer
def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    for text in [*TEXTS, "a<|endoftext|>b", ""]:
        assert loaded.encode(text) == tokenizer.encode(text)
    facts = ["vocab_size", "end_of_document", "is_bytes"]
    assert [getattr(loaded, f) for f in facts] == [getattr(tokenizer, f) for f in facts]
    assert load_tokenizer(tmp_path).to_json() == path.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def foreign(end, special=True):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    library.add_tokens([AddedToken(end, special=special)])
    return library


@pytest.mark.parametrize(("end", "special"), [("<|endoftext|>", False), ("</s>", True), ("[EOS]", False)])
def test_a_tokenizer_from_elsewhere_is_read_without_its_traps(tmp_path, end, special):
    library = foreign(end, special)
    library.enable_truncation(3)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (281, 280)
    text = f"narrow{end} railway trains"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 280 not in tokenizer.encode(text)
    assert not tokenizer.is_bytes


def test_every_refusal_says_what_to_do(tmp_path):
    path = tmp_path / "tokenizer.json"
    magic = b'{"version": "1.0", "model": {"type": "Magic"}}'
    for content in (b"", b"{}", magic, b"\xff\xfe", b"\x80\x04pickle"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
            load_tokenizer(path)
    path.write_text(foreign("<stop>").to_str())
    with pytest.raises(UserError, match=r"no id for the end .* special tokens: <stop>\); rename or add one"):
        load_tokenizer(path)
    for tokenizer in TOKENIZERS.values():
        with pytest.raises(UserError, match=r"half a surrogate pair \(U\+D800\) at character 2"):
            tokenizer.encode("ab\ud800")


def test_names_choose_tokenizers(tmp_path):
    learnt = train_bpe(TEXTS, 300)
    learnt.save(tmp_path / "tokenizer.json")
    assert make_tokenizer("bpe-260", TEXTS).vocab_size == 260
    assert make_tokenizer(str(tmp_path), []).to_json() == learnt.to_json()
    before = tokenizer_identity(str(tmp_path))
    train_bpe(TEXTS, 290).save(tmp_path / "tokenizer.json")
    assert tokenizer_identity(str(tmp_path)) != before


def test_a_name_that_is_none_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in {
        "byte": "unknown tokenizer 'byte'; the nearest is 'bytes'",
        "bpe-": "unknown tokenizer 'bpe-'; the nearest is 'bpe-",
        "bpe-256": "too small: 256 bytes and the end of a document need at least bpe-257",
        f"bpe-{10**14}": "too large",
        "mine.json": "tokenizer file 'mine.json' does not exist",
        "no/such": "tokenizer file 'no/such' does not exist",
    }.items():
        with pytest.raises(UserError, match=words):
            tokenizer_identity(name)

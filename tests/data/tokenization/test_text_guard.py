"""What tokenizers of others do to a text silently: it is undone, or refused."""

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import load_tokenizer, prepare
from narrowgauge.trainer.data.tokenization.tokenizer import batch_encoder

LETTERS = [*"abcdefghijklmnopqrstuvwxyz <>/", "\u2581"]


def loaded(tmp_path, model, cutter=None, special=("</s>", "<s>"), **parts):
    library = Library(model)
    if cutter is not None:
        library.pre_tokenizer = cutter
    for name, part in parts.items():
        setattr(library, name, part)
    library.add_special_tokens(list(special))
    library.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


def unigram():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0)]
    return models.Unigram(pieces + [(letter, -3.0) for letter in LETTERS], unk_id=0)


def merged():
    """A BPE that has learnt the name of its end token from HTML."""
    words = ["<unk>", "</s>", "<s>", *LETTERS, "</", "</s", "<s"]
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("<", "s"), ("<s", ">")]
    return models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>")


@pytest.mark.parametrize("model", [unigram, merged])
def test_the_names_of_control_tokens_in_a_text_are_text(tmp_path, model):
    tokenizer = loaded(tmp_path, model(), special=("</s>", "<s>", "<unk>"))
    text = "a<s>struck</s>out</s>"
    ids = tokenizer.encode(text)
    assert not {1, 2} & set(ids)
    assert "".join(tokenizer.library.id_to_token(i) for i in ids) == text
    assert tokenizer.encode_batch(["b", text]) == [tokenizer.encode("b"), ids]
    assert [list(row) for row in batch_encoder(tokenizer, "<u2")([text])] == [ids]
    assert tokenizer.encode("a\u6f22") == [*tokenizer.encode("a"), 0], "what is unknown is text"


def test_a_name_that_only_a_normalizer_makes_is_refused(tmp_path):
    tokenizer = loaded(tmp_path, unigram(), normalizer=normalizers.NFKC())
    with pytest.raises(UserError, match="a part of the text as its control token '</s>'; remove it"):
        tokenizer.encode("a\uff1c/s\uff1e")


def learnt(cutter):
    """A BPE that knows the characters of one sentence, and has no token for others."""
    library = Library(models.BPE())
    library.pre_tokenizer = cutter
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    library.train_from_iterator(["the quick brown fox"] * 9, trainer)
    return library.model


CUTTERS = [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Whitespace()]


@pytest.mark.parametrize("cutter", CUTTERS, ids=repr)
def test_a_character_that_would_be_left_out_is_refused(tmp_path, cutter):
    tokenizer = loaded(tmp_path, learnt(cutter), cutter)
    assert tokenizer.encode("the fox")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="no token for '\u00ef' and none for unknown characters"):
            encode("the t\u00efe fox")
    (tmp_path / "a.txt").write_text("the fox " * 5000 + "t\u00efe")
    with pytest.raises(UserError, match="no token for '\u00ef'"):
        prepare(str(tmp_path / "a.txt"), str(tmp_path / "tokenizer.json"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_character_left_out(tmp_path):
    """A model keeps what it has a token for, and a rule of its own may remove characters."""
    model = models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>")
    assert loaded(tmp_path, model, pre_tokenizers.Whitespace()).encode("a\u00efa") == [1, 0, 1]
    few, every = {"a": 0, "<0xC3>": 1}, {"a": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    tokenizer = loaded(tmp_path, models.BPE(vocab=every, merges=[], byte_fallback=True))
    assert tokenizer.encode("a\u00ef") == [0, 0xC3 + 1, 0xAF + 1], "bytes stand for what is unknown"
    tokenizer = loaded(tmp_path, models.BPE(vocab=few, merges=[], byte_fallback=True))
    with pytest.raises(UserError, match="no token for '\u00ef'"):
        tokenizer.encode("a\u00ef")
    cutter, model = pre_tokenizers.Split("-", "removed"), models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    tokenizer = loaded(tmp_path, model, cutter, normalizer=normalizers.Lowercase(), decoder=decoders.Fuse())
    assert tokenizer.encode("A-b") == [0, 1]

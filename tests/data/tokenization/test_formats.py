"""Tokenizers of others: GPT-2's two files, tiktoken's ranks, plain ids; and files that are none of them."""

import base64
import json
import random

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import ids_tokenizer, load_tokenizer
from narrowgauge.trainer.data.tokenization.formats import byte_characters
from narrowgauge.trainer.data.tokenization.tokenizer import make_tokenizer, tokenizer_identity

# Pieces of text at which patterns and spellings of different encodings part.
SCRAPS = [*" \n\t'1a", "'s", "'S", "\u017f", "2345", "\u00e9", "e\u0301", "\x85", "\u3000", "x ", "\u4e2d"]
SCRAPS += ["\U0001f682", "Aa", "_/", "ZZZ", "\u00bd", "\u01c5", "\x00", "\u200b", "\r\n", "<|endoftext|>"]


def scraps(seed, count=400):
    rng = random.Random(seed)
    return ["".join(rng.choice(SCRAPS) for _ in range(rng.randint(1, 20))) for _ in range(count)]


def write_gpt2(folder, names=("vocab.json", "merges.txt")):
    """A GPT-2 tokenizer of two merges: " t" and " th"."""
    letters = byte_characters()
    space = letters[0x20]
    tokens = [*letters, space + "t", space + "th", "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
    (folder / names[1]).write_text(f"#version: 0.2\n{space} t\n{space}t h\n", encoding="utf-8")
    return folder


PAIRS = ["vocab.json merges.txt", "gpt2-vocab.json gpt2-merges.txt", "encoder.json vocab.bpe"]


@pytest.mark.parametrize("names", PAIRS)
def test_gpt2_is_read_from_either_of_its_files_or_their_folder(tmp_path, names):
    folder = write_gpt2(tmp_path / "gpt2", names.split())
    places = [folder / name for name in names.split()] + ([] if "gpt2-" in names else [folder])
    for place in places:
        tokenizer = load_tokenizer(place)
        assert (tokenizer.vocab_size, tokenizer.end_of_document) == (259, 258)
        assert tokenizer.encode("a the") == [0x61, 257, 0x65]
        assert tokenizer.encode("a  the") == [0x61, 0x20, 257, 0x65]  # GPT-2's pattern leaves one space alone
    assert len({tokenizer_identity(str(place)) for place in places}) == 1
    assert len({load_tokenizer(place).digest for place in places}) == 1


def test_damage_to_gpt2s_files_is_named(tmp_path):
    for name, content, words in (
        ("vocab.json", '["a"]', "Bad vocabulary json file; name one that is"),
        ("vocab.json", "{", "EOF while parsing"),
        ("merges.txt", "a b\na b c\n", "Merges text file invalid at line 2"),
        ("merges.txt", "unknown token\n", "unknown"),
        ("merges.txt", None, r"half of a tokenizer: there is no merges\.txt next to it"),
    ):
        folder = write_gpt2(tmp_path / "gpt2")
        (folder / name).write_text(content) if content else (folder / name).unlink()
        with pytest.raises(UserError, match=words):
            load_tokenizer(folder / "vocab.json" if content is None else folder)


def many_ranks(count):
    """As many tokens as an encoding has: all bytes, all pairs of bytes, and triples of lower-case letters."""
    tokens = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    triples = (bytes([a, b, c]) for a in range(97, 123) for b in range(256) for c in range(256))
    while len(tokens) < count:
        tokens.append(next(triples))
    return {token: rank for rank, token in enumerate(tokens[:count])}


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


@pytest.mark.tier("thorough")
def test_llama_3_is_read_from_metas_file(tmp_path):
    write_ranks(tmp_path / "tokenizer.model", many_ranks(128_000))
    for tokenizer in (load_tokenizer(tmp_path), make_tokenizer(str(tmp_path / "tokenizer.model"), [])):
        assert (tokenizer.vocab_size, tokenizer.end_of_document) == (128_256, 128_001)
        ids = {"<|begin_of_text|>": 128_000, "<|reserved_special_token_3|>": 128_005, "<|eot_id|>": 128_009}
        ids |= {"<|reserved_special_token_4|>": 128_008, "<|reserved_special_token_250|>": 128_255}
        assert {name: tokenizer.library.token_to_id(name) for name in ids} == ids
        for text in [*scraps(0), "<|begin_of_text|>", "1234567 it's I'LL"]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert max(tokenizer.encode(text), default=0) < 128_000
        # A piece is at most three digits; the last of them is alone.
        assert [tokenizer.decode([i]) for i in tokenizer.encode("1234567")] == ["12", "3", "45", "6", "7"]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("count", [50_256, 128_000])
def test_ids_are_tiktokens(tmp_path, count):
    tiktoken = pytest.importorskip("tiktoken")
    pattern = {
        50_256: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        128_000: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    }[count]
    ranks = many_ranks(count)
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = load_tokenizer(write_ranks(tmp_path / "x.tiktoken", ranks))
    for text in scraps(1, 2000):
        assert ours.encode(text) == theirs.encode_ordinary(text)


def test_a_rank_file_that_is_none_is_refused_with_its_line(tmp_path):
    for content, words in (
        (b"IQ== 0\nIg== 1\n", "byte 0 has no rank"),
        (b"IQ== 0\n\x80\x04\x95\n", "line 2 is not base64 and a rank"),
        (b"IQ== 0\nIQ== 1\n", "line 2 repeats a token or a rank"),
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00", "is not a tokenizer.json, GPT-2's vocab"),  # SentencePiece
    ):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(UserError, match=words):
            load_tokenizer(tmp_path)
    words = r"300 ranks, which matches no known encoding \(known: 50256, 100256, 128000, 199998\); convert"
    with pytest.raises(UserError, match=words):
        load_tokenizer(write_ranks(tmp_path / "x.tiktoken", many_ranks(300)))


def test_plain_ids_are_their_own_text(tmp_path):
    tokenizer = make_tokenizer("ids-4001", [])
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (4001, 4000)
    assert tokenizer.decode([464, 3290, 4000]) == " 464 3290 <|endoftext|>"
    assert tokenizer.encode("3 <|endoftext|> 4") == [3, 4000, 4], "ids as text may name the end of a document"
    tokenizer.save(tmp_path / "tokenizer.json")
    for same in (tokenizer, load_tokenizer(tmp_path)):
        assert same.encode("464 3290") == same.encode(same.decode([464]) + same.decode([3290])) == [464, 3290]
        with pytest.raises(UserError, match="expects ids as text, as in '464 3290'"):
            same.encode("The dog")
        with pytest.raises(UserError, match="expects ids as text"):
            same.encode_batch(["1", "4000"])
    assert load_tokenizer(tmp_path).digest == tokenizer.digest != ids_tokenizer(4001, 0).digest
    assert tokenizer_identity("ids-12") == "ids-12"

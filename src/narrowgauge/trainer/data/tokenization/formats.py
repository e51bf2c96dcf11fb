"""Tokenizer files of other programs: three formats, recognised by the content of the file.

| kind           | files                          | content                                                  |
|----------------|--------------------------------|----------------------------------------------------------|
| tokenizer.json | one                            | the whole tokenizer, in the format of `tokenizers`       |
| GPT-2's        | vocab.json with merges.txt     | {token: id}; and a line `left right` for each merge      |
|                | (encoder.json with vocab.bpe)  |                                                          |
| tiktoken's     | tokenizer.model, NAME.tiktoken | a line `token-in-base64 rank` for each token             |

The first two write each byte of a token as one printable character (`byte_characters`).

**tiktoken's rule** for a piece of text: if it is a token, that is its id; otherwise start from its bytes and
repeatedly join the two neighbours that form the token of the lowest rank. A BPE gives the same ids if its
merges are all ways to form a token from two others, in the order of the token's rank, and if it looks up
complete pieces first. The file does not state how text is cut into pieces and which ids are special. Both
belong to the encoding, which is recognised by its number of ranks:

| ranks   | encoding        | special tokens                              | end of a document           |
|---------|-----------------|---------------------------------------------|-----------------------------|
| 50 256  | gpt2, r50k_base | one                                         | <|endoftext|> 50256         |
| 100 256 | cl100k_base     | 100257 to 100260, and 100276                | <|endoftext|> 100257        |
| 128 000 | Llama 3         | 256, from 128000 (<|begin_of_text|>) on     | <|end_of_text|> 128001      |
| 199 998 | o200k_base      | 199999 and 200018                           | <|endoftext|> 199999        |

Sources: `tiktoken_ext/openai_public.py` and `src/lib.rs` of github.com/openai/tiktoken; `llama/tokenizer.py`
of github.com/meta-llama/llama3; `encoder.py` of github.com/openai/gpt-2.
"""

import base64
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from narrowgauge.system.errors import UserError

TOKENIZER_FILE = "tokenizer.json"

_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+")
_KINDS = "tokenizer.json, GPT-2's vocab.json with its merges.txt, or a tiktoken file"


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+\Z|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
#: How text is cut into pieces, by the name that llama.cpp gives the rule.
PATTERNS = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt-4o": _O200K,
}
_LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
_LLAMA3_RESERVED = [i for i in range(256) if i not in _LLAMA3_NAMED]
_LLAMA3_SPECIAL = {f"<|{name}|>": 128000 + i for i, name in _LLAMA3_NAMED.items()} | {
    f"<|reserved_special_token_{number}|>": 128000 + i for number, i in enumerate(_LLAMA3_RESERVED)
}
_END, _MIDDLES = "<|endoftext|>", ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
# For each number of ranks what a tiktoken file lacks: how text is cut into pieces, and the special tokens.
_ENCODINGS: dict[int, tuple[str, dict[str, int]]] = {
    50256: (_GPT2, {_END: 50256}),
    100256: (
        _CL100K,
        {_END: 100257, "<|endofprompt|>": 100276} | {name: 100258 + i for i, name in enumerate(_MIDDLES)},
    ),
    128000: (_LLAMA3, _LLAMA3_SPECIAL),
    199998: (_O200K, {_END: 199999, "<|endofprompt|>": 200018}),
}


def tokenizer_files(path: Path) -> tuple[Path, ...]:
    """The files that make up the tokenizer at `path`, a file or a folder; () if there is none.

    GPT-2's format has two files, and either may be named; a `UserError` if the other is missing.
    """
    if path.is_dir():
        names = [TOKENIZER_FILE, *(pair[0] for pair in _PAIRS), "tokenizer.model"]
        files = [path / name for name in names if (path / name).is_file()] or sorted(path.glob("*.tiktoken"))
        return tokenizer_files(files[0]) if files else ()
    if not path.is_file():
        return ()
    for pair in _PAIRS:
        for ending, other in (pair, pair[::-1]):
            if path.name.endswith(ending):
                stem = path.name.removesuffix(ending)
                if not path.with_name(stem + other).is_file():
                    raise UserError(
                        f"{path} is half of a tokenizer: there is no {stem + other} next to it; copy it there"
                    )
                return path.with_name(stem + pair[0]), path.with_name(stem + pair[1])
    return (path,)


def read_library(path: Path) -> Library:
    """The tokenizer in the file or folder `path`, in any of the three formats."""
    try:
        files = tokenizer_files(path)
        content = files[0].read_bytes() if files else b""
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}; name a {_KINDS}") from None
    if not files:
        raise UserError(f"cannot read the tokenizer {path}: there is none; name a {_KINDS}")
    try:
        if len(files) == 2:
            return byte_level_bpe(*models.BPE.read_file(*map(str, files)))
        first_line = content.split(b"\n", 1)[0].rstrip(b"\r")
        if _RANK_LINE.fullmatch(first_line):
            return _tiktoken(content)
        return Library.from_str(content.decode("utf-8"))
    except Exception as error:  # the library has no narrower type for an unreadable file
        which = " with ".join(map(str, files))
        raise UserError(f"{which} is not a {_KINDS}: {error}; name one that is") from None


def byte_characters() -> list[str]:
    """The character for each byte in a byte-level vocabulary, indexed by byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes use the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level_bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    pattern: str | None = None,
    ignore_merges: bool = False,
) -> Library:
    """A byte-level BPE of tokens written as `byte_characters`; the first pair of `merges` is joined first.

    `pattern` cuts text into pieces; None: as in GPT-2, "": not at all. With `ignore_merges` a piece that is a
    token is looked up.
    """
    library = Library(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    library.pre_tokenizer = pre_tokenizers.Sequence([*split, last]) if split else last
    library.decoder = decoders.ByteLevel()
    return library


def _tiktoken(content: bytes) -> Library:
    ranks = _ranks(content)
    if len(ranks) not in _ENCODINGS:
        known = ", ".join(map(str, _ENCODINGS))
        raise ValueError(
            f"it has {len(ranks)} ranks, which matches no known encoding (known: {known}); "
            "convert it to a tokenizer.json"
        )
    pattern, special = _ENCODINGS[len(ranks)]
    letters = byte_characters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [(spelled[a], spelled[b]) for a, b in cuts if a in ranks and b in ranks]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()} | special
    library = byte_level_bpe(vocabulary, merges, pattern, ignore_merges=True)
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return library


def _ranks(content: bytes) -> dict[bytes, int]:
    """The token and rank of each line; a `ValueError` gives the number of a malformed line."""
    ranks: dict[bytes, int] = {}
    seen = set[int]()
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            if not _RANK_LINE.fullmatch(line):
                raise ValueError
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
        except ValueError:  # and binascii's
            raise ValueError(f"line {number} is not base64 and a rank") from None
        if token in ranks or int(rank) in seen:
            raise ValueError(f"line {number} repeats a token or a rank")
        ranks[token] = int(rank)
        seen.add(int(rank))
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"byte {missing[0]} has no rank")
    return ranks

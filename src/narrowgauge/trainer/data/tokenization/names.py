"""Names of tokenizers in `data.tokenizer`: `bytes`, `bpe-N`, `ids-N`, or the path of a file."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import user_path
from narrowgauge.trainer.data.tokenization.formats import TOKENIZER_FILE, tokenizer_files
from narrowgauge.trainer.data.tokenization.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    ids_tokenizer,
    load_tokenizer,
    train_bpe,
)


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer called `name`; `bpe-N` is trained on `texts`."""
    if name == "bytes":
        return bytes_tokenizer()
    if entries := _entries("ids", name):
        return ids_tokenizer(entries, entries - 1)
    if entries := _bpe_entries(name):
        return train_bpe(texts, entries)
    return load_tokenizer(_existing(name))


def tokenizer_identity(name: str) -> str:
    """What determines the ids of a text: the name of a built-in tokenizer, or the digest of its files."""
    if name == "bytes" or _bpe_entries(name) or _entries("ids", name):
        return name
    content = b"".join(file.read_bytes() for file in tokenizer_files(_existing(name)))
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _bpe_entries(name: str) -> int | None:
    """N of `bpe-N`; None for another name."""
    entries = _entries("bpe", name)
    if entries and entries < 257:
        raise UserError(
            f"tokenizer {name!r} is too small: 256 bytes and the end of a document need at least bpe-257"
        )
    return entries


def _entries(prefix: str, name: str) -> int | None:
    """N of `PREFIX-N`; None for another name."""
    match = re.fullmatch(prefix + r"-([1-9][0-9]*)", name)
    if match and len(match[1]) > 7:  # the library allocates memory for all N entries at once
        raise UserError(f"tokenizer {name!r} is too large: a vocabulary has at most {prefix}-9999999 entries")
    return int(match[1]) if match else None


def _existing(name: str) -> Path:
    path = user_path(name)
    try:
        if tokenizer_files(path):
            return path
    except OSError as error:
        raise UserError(
            f"cannot look for tokenizer file {name!r}: {error.strerror}; name a tokenizer.json"
        ) from None
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"tokenizer file {name!r} does not exist; name a tokenizer.json, bytes or bpe-4096")
    raise unknown("tokenizer", name, ["bytes", "bpe-4096", "bpe-N", "ids-N", TOKENIZER_FILE])

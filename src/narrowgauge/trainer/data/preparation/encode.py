"""What workers do with a chunk: read its documents, or encode them as token ids."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.trainer.data.sources.records import Chunk, Document, Rejected
from narrowgauge.trainer.data.sources.text import cut_text
from narrowgauge.trainer.data.token_files.token_file import token_dtype
from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from narrowgauge.trainer.data.tokenization.word_cache import word_encoder

Ids = NDArray[np.unsignedinteger[Any]]
EncodeAll = Callable[[list[str]], Iterable[Sequence[int] | Ids]]


@dataclass(frozen=True)
class ReadDocument:
    """A document after a worker has read or encoded it."""

    digest: bytes  # sha256 of name and text
    content: bytes  # a shorter digest of the text alone
    text: str = ""  # if it was read
    ids: Ids = field(
        default_factory=lambda: np.empty(0, np.uint16)
    )  # if it was encoded; the first is that of the end of a document, as in llm.c


@dataclass(frozen=True)
class Batch:
    """The documents of a chunk."""

    size: int  # bytes of the source in this chunk
    documents: list[ReadDocument]
    rejected: list[Rejected]


def read_chunk(cut: bool, chunk: Chunk) -> Batch:
    """The texts of a chunk; with `cut`, documents are cut into pieces."""
    documents, rejected = _divide(chunk, cut)
    return Batch(chunk.size, [ReadDocument(*_digests(d), text=d.text) for d in documents], rejected)


def encode_chunk(tokenizer: Path, sha256: str, cut: bool, chunk: Chunk) -> Batch:
    """The ids of a chunk by the tokenizer in a file of this sha256; `cut` as for `read_chunk`."""
    loaded, encode_all = _loaded(tokenizer, sha256)
    documents, rejected = _divide(chunk, cut)
    encoded = list[ReadDocument]()
    for document, row in zip(documents, encode_all([d.text for d in documents]), strict=True):
        ids = np.empty(len(row) + 1, token_dtype(loaded.vocab_size))
        ids[0], ids[1:] = loaded.end_of_document, row
        encoded.append(ReadDocument(*_digests(document), ids=ids))
    return Batch(chunk.size, encoded, rejected)


def _divide(chunk: Chunk, cut: bool) -> tuple[list[Document], list[Rejected]]:
    documents, rejected = list[Document](), list[Rejected]()
    for record in chunk.records():
        if isinstance(record, Rejected):
            rejected.append(record)
        elif cut:
            pieces = enumerate(cut_text([record.text]))
            documents += [Document(f"{record.name}#{i}", text) for i, text in pieces if not text.isspace()]
        else:
            documents.append(record)
    return documents, rejected


def _digests(document: Document) -> tuple[bytes, bytes]:
    """The digests of name and text, and of the text."""
    # A name may hold bytes of a file system that are not UTF-8; a text may not.
    name = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
    text = document.text.encode("utf-8")
    return hashlib.sha256(name + text).digest(), hashlib.blake2b(text, digest_size=16).digest()


def batch_encoder(tokenizer: Tokenizer) -> EncodeAll:
    """The fastest function that gives the tokenizer's ids for each text."""
    if tokenizer.is_bytes:
        return lambda texts: (np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts)
    by_words = word_encoder(tokenizer, token_dtype(tokenizer.vocab_size))
    return tokenizer.encode_batch if by_words is None else partial(map, by_words)


@lru_cache(1)  # loaded once in a process; the digest tells a file from an earlier one in the same place
def _loaded(path: Path, sha256: str) -> tuple[Tokenizer, EncodeAll]:
    tokenizer = load_tokenizer(path)
    return tokenizer, batch_encoder(tokenizer)

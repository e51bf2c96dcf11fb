"""Worker functions for a chunk: encode its documents as token ids, or pack their text for later."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.sources.records import Chunk, Document, Rejected
from narrowgauge.data.sources.text import cut_text
from narrowgauge.data.token_files.token_file import token_dtype
from narrowgauge.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from narrowgauge.data.tokenization.word_cache import word_encoder

Ids = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class EncodedDocument:
    """What is recorded about a document."""

    digest: bytes  # sha256 of name and text
    content: bytes  # a shorter digest of the text alone
    characters: int
    tokens: int = 0  # 0 if it is not encoded


@dataclass(frozen=True)
class EncodedBatch:
    """The documents of a chunk, encoded as concatenated ids or packed as text."""

    size: int  # bytes of the source in this chunk
    documents: list[EncodedDocument]
    rejected: list[Rejected]
    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.uint16))
    packed: bytes = b""


@dataclass(frozen=True)
class Packed:
    """Documents between the first and the second reading: compressed JSON."""

    data: bytes

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return len(self.data)

    def records(self) -> Iterator[Document | Rejected]:
        """The packed documents."""
        for name, text in json.loads(zlib.decompress(self.data)):
            yield Document(name, text)


@dataclass(frozen=True)
class Encoder:
    """Makes a worker's encoding function from a tokenizer file; with `cut`, documents are cut into pieces."""

    tokenizer: Path
    cut: bool = False

    def __call__(self) -> Callable[[Chunk], EncodedBatch]:
        """The function."""
        tokenizer = load_tokenizer(self.tokenizer)
        encode_all = _encoder(tokenizer)

        def encode(chunk: Chunk) -> EncodedBatch:
            documents, rejected = _divide(chunk, self.cut)
            rows = _with_ends(encode_all([document.text for document in documents]), tokenizer)
            facts = [_facts(*pair) for pair in zip(documents, map(len, rows), strict=True)]
            ids = np.concatenate(rows) if rows else np.empty(0, token_dtype(tokenizer.vocab_size))
            return EncodedBatch(chunk.size, facts, rejected, ids=ids)

        return encode


@dataclass(frozen=True)
class Packer:
    """Makes a worker's packing function, used while there is no tokenizer yet."""

    cut: bool = False

    def __call__(self) -> Callable[[Chunk], EncodedBatch]:
        """The function."""

        def pack(chunk: Chunk) -> EncodedBatch:
            documents, rejected = _divide(chunk, self.cut)
            pairs = json.dumps([(document.name, document.text) for document in documents])
            packed = zlib.compress(pairs.encode("utf-8"), 1)
            return EncodedBatch(chunk.size, list(map(_facts, documents)), rejected, packed=packed)

        return pack


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


def _facts(document: Document, tokens: int = 0) -> EncodedDocument:
    # A name may hold bytes of a file system that are not UTF-8; a text may not.
    name = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
    text = document.text.encode("utf-8")
    digest = hashlib.sha256(name + text).digest()
    return EncodedDocument(digest, hashlib.blake2b(text, digest_size=16).digest(), len(document.text), tokens)


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], Iterable[Sequence[int] | Ids]]:
    """The fastest function that gives the tokenizer's ids for each text."""
    if tokenizer.is_bytes:
        return lambda texts: (np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts)
    by_words = word_encoder(tokenizer, token_dtype(tokenizer.vocab_size))
    return tokenizer.encode_batch if by_words is None else partial(map, by_words)


def _with_ends(rows: Iterable[Sequence[int] | Ids], tokenizer: Tokenizer) -> list[Ids]:
    """The ids of each text, preceded by the end-of-document id as in llm.c."""
    documents = []
    for row in rows:
        ids = np.empty(len(row) + 1, token_dtype(tokenizer.vocab_size))
        ids[0], ids[1:] = tokenizer.end_of_document, row
        documents.append(ids)
    return documents

"""What does a worker do with a chunk? It makes documents of it, and of these token ids, or text for later."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.sources import Chunk, Document, Rejected
from narrowgauge.data.sources.text import cut_text
from narrowgauge.data.token_file import token_dtype
from narrowgauge.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Found:
    """A document as it is counted: its digest, that of its text alone, its characters, its ids if encoded."""

    digest: bytes
    content: bytes
    characters: int
    tokens: int = 0


@dataclass(frozen=True)
class Batch:
    """What came of a chunk: `ids` of all documents end to end, or their names and texts, `packed`."""

    size: int
    found: list[Found]
    rejected: list[Rejected]
    ids: NDArray[np.unsignedinteger[Any]] = field(default_factory=lambda: np.empty(0, dtype=np.uint16))
    packed: bytes = b""


@dataclass(frozen=True)
class Packed:
    """Documents on their way from one reading to the next: JSON, compressed."""

    data: bytes

    @property
    def size(self) -> int:
        """Bytes as they lie on the disk."""
        return len(self.data)

    def records(self) -> Iterator[Document | Rejected]:
        """The documents that were packed."""
        for name, text in json.loads(zlib.decompress(self.data)):
            yield Document(name, text)


@dataclass(frozen=True)
class Encoder:
    """Makes the work of a process that encodes with the tokenizer in a file; `cut`: documents in pieces."""

    tokenizer: Path
    cut: bool = False

    def __call__(self) -> Callable[[Chunk], Batch]:
        """The work."""
        tokenizer = load_tokenizer(self.tokenizer)

        def encode(chunk: Chunk) -> Batch:
            documents, rejected = _divide(chunk, self.cut)
            rows = _encoded(tokenizer, [document.text for document in documents])
            found = [_found(*pair) for pair in zip(documents, map(len, rows), strict=True)]
            ids = np.concatenate(rows) if rows else np.empty(0, token_dtype(tokenizer.vocab_size))
            return Batch(chunk.size, found, rejected, ids=ids)

        return encode


@dataclass(frozen=True)
class Packer:
    """Makes the work of a process that keeps documents until there is a tokenizer."""

    cut: bool = False

    def __call__(self) -> Callable[[Chunk], Batch]:
        """The work."""

        def pack(chunk: Chunk) -> Batch:
            documents, rejected = _divide(chunk, self.cut)
            pairs = json.dumps([(document.name, document.text) for document in documents])
            found = [_found(document) for document in documents]
            return Batch(chunk.size, found, rejected, packed=zlib.compress(pairs.encode("utf-8"), 1))

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


def _found(document: Document, tokens: int = 0) -> Found:
    # A name may hold bytes of a file system that are not UTF-8; a text may not.
    name = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
    text = document.text.encode("utf-8")
    digest = hashlib.sha256(name + text).digest()
    return Found(digest, hashlib.blake2b(text, digest_size=16).digest(), len(document.text), tokens)


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
    """The ids of each text, its end-of-document id first, as llm.c has it."""
    dtype, end = token_dtype(tokenizer.vocab_size), tokenizer.end_of_document
    rows = list[NDArray[np.unsignedinteger[Any]]]()
    utf8s = [text.encode("utf-8") for text in texts] if tokenizer.is_bytes else []
    ids = [np.frombuffer(utf8, np.uint8) for utf8 in utf8s] or tokenizer.encode_batch(texts)
    for of_text in ids:
        row = np.empty(len(of_text) + 1, dtype)
        row[0], row[1:] = end, of_text
        rows.append(row)
    return rows

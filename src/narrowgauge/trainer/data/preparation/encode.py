"""What workers do with a chunk: read its documents, or encode them as token ids."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.trainer.data.sources.records import Chunk, Document, Rejected
from narrowgauge.trainer.data.sources.text import cut_text
from narrowgauge.trainer.data.token_files.token_file import token_dtype
from narrowgauge.trainer.data.tokenization.tokenizer import load_tokenizer
from narrowgauge.trainer.data.tokenization.word_cache import EncodeAll, batch_encoder

_NO_IDS: NDArray[Any] = np.empty(0, np.uint16)


@dataclass(frozen=True, eq=False)
class ReadDocument:
    """A document after a worker has read or encoded it."""

    digest: bytes  # sha256 of name and text
    content: bytes  # a shorter digest of the text alone
    text: str  # if it was read
    ids: NDArray[Any]  # if it was encoded; the first is that of the end of a document, as in llm.c


@dataclass(frozen=True)
class ReadChunk:
    """The documents of a chunk."""

    size: int  # bytes of the source in this chunk
    documents: list[ReadDocument]
    rejected: list[Rejected]


def read_chunk(cut: bool, chunk: Chunk) -> ReadChunk:
    """The texts of a chunk; with `cut`, documents are cut into pieces."""
    documents, rejected = list[ReadDocument](), list[Rejected]()
    for record in chunk.records():
        if isinstance(record, Rejected):
            rejected.append(record)
        else:
            documents += map(_digested, _pieces(record) if cut else [record])
    return ReadChunk(chunk.size, documents, rejected)


def encode_chunk(tokenizer: Path, sha256: str, cut: bool, chunk: Chunk) -> ReadChunk:
    """The ids of a chunk by the tokenizer in a file of this sha256; `cut` as for `read_chunk`."""
    read, (encode_all, end, dtype) = read_chunk(cut, chunk), _loaded(tokenizer, sha256)
    encoded = list[ReadDocument]()
    rows = encode_all([document.text for document in read.documents])
    for document, row in zip(read.documents, rows, strict=True):
        ids = np.empty(len(row) + 1, dtype)
        ids[0], ids[1:] = end, row
        encoded.append(replace(document, text="", ids=ids))
    return replace(read, documents=encoded)


@lru_cache(1)  # loaded once in a process; the digest tells a file from an earlier one in the same place
def _loaded(path: Path, sha256: str) -> tuple[EncodeAll, int, np.dtype[Any]]:
    """A function that encodes texts, the id of the end of a document, and the dtype of ids."""
    tokenizer = load_tokenizer(path)
    dtype = token_dtype(tokenizer.vocab_size)
    return batch_encoder(tokenizer, dtype), tokenizer.end_of_document, dtype


def _pieces(document: Document) -> Iterator[Document]:
    for number, text in enumerate(cut_text([document.text])):
        if not text.isspace():
            yield Document(f"{document.name}#{number}", text)


def _digested(document: Document) -> ReadDocument:
    # A name may hold bytes of a file system that are not UTF-8; a text may not.
    name = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
    text = document.text.encode("utf-8")
    digests = hashlib.sha256(name + text).digest(), hashlib.blake2b(text, digest_size=16).digest()
    return ReadDocument(*digests, document.text, _NO_IDS)

"""What worker processes do with a chunk, in the order of chunks: read its documents, or encode them as ids.

The caller's thread reads the items and sends each to a process; results are returned in the order of the
items. The number of pending items is bounded, so memory does not depend on their total.

Processes are not forked from the caller, because a fork would break its threads. They come from a fork server
that has imported the package, where the platform has one, and are spawned elsewhere. A script that uses more
than one worker therefore needs `if __name__ == "__main__":`.
"""

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.system.processes import depend_on_parent
from narrowgauge.trainer.data.sources.records import Chunk, Document, Rejected
from narrowgauge.trainer.data.sources.text import cut_text
from narrowgauge.trainer.data.token_files.token_file import token_dtype
from narrowgauge.trainer.data.tokenization.tokenizer import load_tokenizer
from narrowgauge.trainer.data.tokenization.word_cache import EncodeAll, batch_encoder

A = TypeVar("A")
B = TypeVar("B")

_NO_IDS: NDArray[Any] = np.empty(0, np.uint16)
_PENDING = 8  # items for each process that are worked on, or whose results wait for an earlier one


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


def usable_cores() -> int:
    """The number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[B]:
    """Map items, read as they are needed, to results in several processes, in the order of the items.

    With several workers the function, the items and the results are pickled; with one the caller does the
    work. An error of the function is raised here.
    """
    assert workers >= 1
    if workers == 1:
        yield from map(function, items)
        return
    pending = deque[Future[B]]()
    with ProcessPoolExecutor(workers, _context(), _start_worker) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) == _PENDING * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            # Python 3.11 waits for a process that started meanwhile, and for a reader (cpython#94777).
            for process in pool._processes.values():
                process.kill()
            pool._call_queue._reader.close()  # type: ignore[attr-defined]
            raise UserError(
                f"one of {workers} workers was killed, most likely for lack of memory; use fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker() -> None:
    """Set up a worker process."""
    depend_on_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel

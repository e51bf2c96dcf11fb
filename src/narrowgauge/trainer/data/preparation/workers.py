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
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from narrowgauge.system.errors import UserError
from narrowgauge.system.processes import depend_on_parent
from narrowgauge.trainer.data.sources.readers import cut_text
from narrowgauge.trainer.data.sources.records import Chunk, Rejected
from narrowgauge.trainer.data.token_files.tokens import token_dtype
from narrowgauge.trainer.data.tokenization.tokenizer import EncodeAll, batch_encoder, load_tokenizer

A = TypeVar("A")
B = TypeVar("B")

_PENDING = 8  # items for each process that are worked on, or whose results wait for an earlier one


class ReadDocument(NamedTuple):
    """A document after a worker has read or encoded it."""

    digest: bytes  # sha256 of name and text
    content: bytes  # a shorter digest of the text alone
    body: Any  # its text, or its ids; the first of these is that of the end of a document, as in llm.c


ReadChunk = tuple[
    int, list[ReadDocument], list[Rejected]
]  # the bytes of the source in it, and what they hold


def read_chunk(cut: bool, tokenizer: tuple[Path, str] | None, chunk: Chunk) -> ReadChunk:
    """The texts of a chunk, or their ids.

    Args:
        cut: Whether documents are cut into pieces.
        tokenizer: A tokenizer's file and its sha256; None = texts are not encoded.
        chunk: The chunk.
    """
    documents, rejected = list[ReadDocument](), list[Rejected]()
    for record in chunk.records():
        if isinstance(record, Rejected):
            rejected.append(record)
        elif cut:
            pieces = (piece for piece in enumerate(cut_text([record.text])) if not piece[1].isspace())
            documents.extend(_digested(f"{record.name}#{number}", text) for number, text in pieces)
        else:
            documents.append(_digested(record.name, record.text))
    if tokenizer is not None:
        encode_all, end, dtype = _loaded(*tokenizer)
        rows = encode_all([document.body for document in documents])
        for number, (document, row) in enumerate(zip(documents, rows, strict=True)):
            ids = np.empty(len(row) + 1, dtype)
            ids[0], ids[1:] = end, row
            documents[number] = document._replace(body=ids)
    return chunk.size, documents, rejected


def _digested(name: str, text: str) -> ReadDocument:
    # A name may hold bytes of a file system that are not UTF-8; a text may not.
    of_name = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    utf8 = text.encode("utf-8")
    content = hashlib.blake2b(utf8, digest_size=16).digest()
    return ReadDocument(hashlib.sha256(of_name + utf8).digest(), content, text)


@lru_cache(1)  # loaded once in a process; the digest tells a file from an earlier one in the same place
def _loaded(path: Path, sha256: str) -> tuple[EncodeAll, int, np.dtype[Any]]:
    """A function that encodes texts, the id of the end of a document, and the dtype of ids."""
    tokenizer = load_tokenizer(path)
    dtype = token_dtype(tokenizer.vocab_size)
    return batch_encoder(tokenizer, dtype), tokenizer.end_of_document, dtype


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

"""Writes the documents of many batches as the two parts of a corpus.

It works in one pass and keeps only counts of a document: ids are appended to one file for each part, and at
the end these are copied to token files. A document that has to change sides, because the other side is empty,
does so in that copy.
"""

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.preparation.document_filter import TRAIN, VAL, DocumentFilter, rank
from narrowgauge.data.preparation.encode import Batch
from narrowgauge.data.token_files.token_file import TokenFile, token_dtype, write_token_shards

MOST_TOKENS = 1 << 30  # in one token file
_COPY = 1 << 22  # tokens copied at once
_RANK = attrgetter("rank")


@dataclass(frozen=True)
class DocumentSpan:
    """A document that may have to change sides: its rank in the split, and the range of its ids."""

    rank: int
    start: int
    tokens: int


class ShardWriter:
    """Writer of both parts; a context manager that closes its files."""

    def __init__(self, directory: Path, vocab_size: int, document_filter: DocumentFilter) -> None:
        self.directory, self.vocab_size, self.document_filter = directory, vocab_size, document_filter
        self.tokens = {TRAIN: 0, VAL: 0}
        self._extremes = list[DocumentSpan]()  # the document of the lowest rank, and of the highest
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> "ShardWriter":
        self._files = {side: (self.directory / f"{side}.ids").open("wb") for side in (TRAIN, VAL)}
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, batch: Batch) -> None:
        """Add the documents of the next batch."""
        self.document_filter.reject(batch.rejected)
        at = 0
        for document in batch.documents:
            if (side := self.document_filter.side(document)) is not None:
                self._files[side].write(batch.ids[at : at + document.tokens].data)
                span = DocumentSpan(rank(document.digest), self.tokens[side], document.tokens)
                spans = [*self._extremes, span]
                self._extremes = [min(spans, key=_RANK), max(spans, key=_RANK)]
                self.tokens[side] += document.tokens
            at += document.tokens

    def write(self) -> dict[str, dict[str, TokenFile]]:
        """Write the token files, delete the files of ids, and return the facts of each side by file name."""
        for file in self._files.values():
            file.close()
        documents, moved = self.document_filter.documents, None
        empty = next((side for side in (TRAIN, VAL) if not documents[side]), None)
        if empty:
            moved = self._extremes[0 if empty == VAL else 1]
            documents[empty] += 1
            documents[TRAIN if empty == VAL else VAL] -= 1
        files = {side: self._token_files(side, empty, moved) for side in (TRAIN, VAL)}
        for side in (TRAIN, VAL):
            (self.directory / f"{side}.ids").unlink()
        return files

    def _token_files(self, side: str, empty: str | None, moved: DocumentSpan | None) -> dict[str, TokenFile]:
        other = TRAIN if side == VAL else VAL
        dtype = token_dtype(self.vocab_size)
        path = self.directory / f"{other if side == empty else side}.ids"
        ids: NDArray[Any] = np.memmap(path, dtype, "r")
        spans = [(0, len(ids))]
        if moved is not None:
            span = (moved.start, moved.start + moved.tokens)
            spans = [span] if side == empty else [(0, span[0]), (span[1], len(ids))]
        chunks = (
            ids[at : min(at + _COPY, stop)] for start, stop in spans for at in range(start, stop, _COPY)
        )
        written = write_token_shards(self.directory, side, chunks, self.vocab_size, MOST_TOKENS)
        if len(written) == 1:
            ((path, facts),) = written.items()
            return {path.rename(self.directory / f"{side}.bin").name: facts}
        return {path.name: facts for path, facts in written.items()}

"""A buffer of documents on disk, for a source that is read only once.

The documents of the first reading are stored, compressed, in the staging directory of the corpus until there
is a tokenizer to encode them with. The tokenizer is trained on training documents only, and on the same ones
in every run: those with the lowest digests, until there are enough characters. A heap keeps their locations
and never holds more than these.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from narrowgauge.data.preparation.document_filter import TRAIN, DocumentFilter
from narrowgauge.data.preparation.encode import EncodedBatch, Packed
from narrowgauge.data.sources.records import Chunk, Document

TRAINING_CHARACTERS = 8 << 20  # more text changes the merges little, but costs time and memory


@dataclass(frozen=True, order=True)
class _Location:
    """Document `number` of a pack; equal digests are ordered as they were read."""

    pack: int
    number: int
    characters: int


class DocumentBuffer:
    """The documents of a first reading, in the file `path`, which is deleted at the end."""

    def __init__(self, path: Path, document_filter: DocumentFilter) -> None:
        self._path, self._filter = path, document_filter
        self._ends = [0]  # positions of the packs in the file
        self._heap: list[tuple[int, _Location]] = []  # training documents; the highest digest first
        self._characters = 0  # sum over the heap
        self._extremes: list[tuple[int, _Location]] = []  # the lowest and the highest digest of all
        self._file: IO[bytes]

    def __enter__(self) -> "DocumentBuffer":
        self._file = self._path.open("w+b")
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._path.unlink()

    def add(self, batch: EncodedBatch) -> None:
        """Add the documents of the next batch."""
        self._filter.reject(batch.rejected)
        for number, document in enumerate(batch.documents):
            if (side := self._filter.side(document)) is None:
                continue
            key = int.from_bytes(document.digest, "big")
            location = _Location(len(self._ends) - 1, number, document.characters)
            ordered = sorted([*self._extremes, (key, location)])
            self._extremes = ordered if len(ordered) < 2 else [ordered[0], ordered[-1]]
            if side == TRAIN:
                self._offer(key, location)
        self._file.write(batch.packed)
        self._ends.append(self._ends[-1] + len(batch.packed))

    def _offer(self, key: int, location: _Location) -> None:
        """Keep the fewest documents with the lowest digests that have enough characters."""
        heapq.heappush(self._heap, (-key, location))
        self._characters += location.characters
        while self._characters - self._heap[0][1].characters >= TRAINING_CHARACTERS:
            self._characters -= heapq.heappop(self._heap)[1].characters

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._ends[-1]

    def texts(self) -> Iterator[tuple[str, float]]:
        """The training texts in source order, each with the fraction done once it is read."""
        left, chosen = TRAINING_CHARACTERS, dict[int, dict[int, int]]()
        for location in self._training_documents():
            chosen.setdefault(location.pack, {})[location.number] = min(left, location.characters)
            left -= location.characters
        for done, pack in enumerate(sorted(chosen), 1):
            for number, record in enumerate(self._pack(pack).records()):
                if number in chosen[pack] and isinstance(record, Document):
                    yield record.text[: chosen[pack][number]], done / len(chosen)

    def _training_documents(self) -> list[_Location]:
        """Training documents by digest, excluding one that will move to a part that would be empty."""
        locations = [location for _, location in sorted(self._heap, reverse=True)]
        sides = self._filter.documents
        if not sides[TRAIN]:
            return [self._extremes[-1][1]]
        return locations if sides[TRAIN] < self._filter.kept else locations[1:]  # the lowest will be held out

    def chunks(self) -> Iterator[Chunk]:
        """All documents, read back."""
        for number in range(len(self._ends) - 1):
            yield self._pack(number)

    def _pack(self, number: int) -> Packed:
        start, end = self._ends[number : number + 2]
        self._file.seek(start)
        return Packed(self._file.read(end - start))

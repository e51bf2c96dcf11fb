"""What does a tokenizer learn from, when the text can be read only once?

The documents of the first reading lie compressed beside the corpus that is being built, until there is a
tokenizer to encode them with. Learnt from are training documents only, the same for every run: those of the
lowest digest, until there are enough characters. Their places are kept, in a heap that never holds more.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from narrowgauge.data.preparation.document_filter import TRAIN, DocumentFilter
from narrowgauge.data.preparation.encode import EncodedBatch, Packed
from narrowgauge.data.sources import Chunk, Document

LEARN_FROM = 8 << 20  # characters: more changes the merges little, and costs time and memory


@dataclass(frozen=True, order=True)
class _Place:
    """Document `number` of a pack; the order is that of the reading, digests apart."""

    pack: int
    number: int
    characters: int


class DocumentBuffer:
    """The documents of a first reading, in the file `path`, which goes at the end."""

    def __init__(self, path: Path, document_filter: DocumentFilter) -> None:
        self._path, self._sieve = path, document_filter
        self._ends = [0]  # of the packs in the file
        self._heap: list[tuple[int, _Place]] = []  # training documents; the highest digest first
        self._characters = 0  # of those
        self._extremes: list[tuple[int, _Place]] = []  # the lowest and the highest digest of all
        self._file: IO[bytes]

    def __enter__(self) -> "DocumentBuffer":
        self._file = self._path.open("w+b")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink()

    def add(self, batch: EncodedBatch) -> None:
        """The documents of the next batch."""
        self._sieve.reject(batch.rejected)
        for number, found in enumerate(batch.found):
            if (side := self._sieve.side(found)) is None:
                continue
            key = int.from_bytes(found.digest, "big")
            place = _Place(len(self._ends) - 1, number, found.characters)
            several = sorted([*self._extremes, (key, place)])
            self._extremes = several if len(several) < 2 else [several[0], several[-1]]
            if side == TRAIN:
                self._offer(key, place)
        self._file.write(batch.packed)
        self._ends.append(self._ends[-1] + len(batch.packed))

    def _offer(self, key: int, place: _Place) -> None:
        """Keep the fewest documents of lowest digests that have characters enough."""
        heapq.heappush(self._heap, (-key, place))
        self._characters += place.characters
        while self._characters - self._heap[0][1].characters >= LEARN_FROM:
            self._characters -= heapq.heappop(self._heap)[1].characters

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._ends[-1]

    def texts(self) -> Iterator[tuple[str, float]]:
        """What to learn from, in the order of the source, each with the share that is done by then."""
        left, chosen = LEARN_FROM, dict[int, dict[int, int]]()
        for place in self._to_learn_from():
            chosen.setdefault(place.pack, {})[place.number] = min(left, place.characters)
            left -= place.characters
        for done, pack in enumerate(sorted(chosen), 1):
            for number, record in enumerate(self._pack(pack).records()):
                if number in chosen[pack] and isinstance(record, Document):
                    yield record.text[: chosen[pack][number]], done / len(chosen)

    def _to_learn_from(self) -> list[_Place]:
        """Training documents by digest, as they will be when no part is empty."""
        places = [place for _, place in sorted(self._heap, reverse=True)]
        sides = self._sieve.documents
        if not sides[TRAIN]:
            return [self._extremes[-1][1]]
        return places if sides[TRAIN] < self._sieve.kept else places[1:]  # the lowest will be held out

    def chunks(self) -> Iterator[Chunk]:
        """All documents once more."""
        for number in range(len(self._ends) - 1):
            yield self._pack(number)

    def _pack(self, number: int) -> Packed:
        start, end = self._ends[number : number + 2]
        self._file.seek(start)
        return Packed(self._file.read(end - start))

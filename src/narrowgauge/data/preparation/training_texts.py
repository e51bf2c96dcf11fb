"""Chooses the texts that a new tokenizer is trained on.

They are training documents only, and the same ones in every run: those with the lowest digests, until there
are enough characters. A heap holds no more than these.
"""

import heapq

from narrowgauge.data.preparation.document_filter import TRAIN, DocumentFilter
from narrowgauge.data.preparation.encode import Batch

TRAINING_CHARACTERS = 8 << 20  # more text changes the merges little, but costs time and memory


class TrainingTexts:
    """The texts of a first reading of the documents to train a tokenizer on."""

    def __init__(self, document_filter: DocumentFilter) -> None:
        self._filter = document_filter
        self._heap: list[tuple[int, int, str]] = []  # (-digest, number, text); the highest digest first
        self._characters = 0  # sum over the heap
        self._highest: tuple[int, str] = (-1, "")  # digest and text, of all documents

    def add(self, batch: Batch) -> None:
        """Offer the documents of the next batch: keep the fewest with the lowest digests that suffice."""
        self._filter.reject(batch.rejected)
        for document, text in zip(batch.documents, batch.texts, strict=True):
            if (side := self._filter.side(document)) is None:
                continue
            key = int.from_bytes(document.digest, "big")
            self._highest = max(self._highest, (key, text))
            if side == TRAIN:
                heapq.heappush(self._heap, (-key, self._filter.kept, text))
                self._characters += len(text)
            while self._heap and self._characters - len(self._heap[0][2]) >= TRAINING_CHARACTERS:
                self._characters -= len(heapq.heappop(self._heap)[2])

    def texts(self) -> list[str]:
        """The texts in source order."""
        left, chosen = TRAINING_CHARACTERS, list[tuple[int, str]]()
        for _, number, text in self._training_documents():
            chosen.append((number, text[:left]))
            left -= len(text[:left])
        return [text for _, text in sorted(chosen)]

    def _training_documents(self) -> list[tuple[int, int, str]]:
        """Training documents by digest, excluding one that will move to a part that would be empty."""
        sides = self._filter.documents
        if not sides[TRAIN]:
            return [(0, 0, self._highest[1])]
        documents = sorted(self._heap, reverse=True)
        return documents if sides[TRAIN] < self._filter.kept else documents[1:]  # the lowest is held out

"""Chooses the texts that a new tokenizer is trained on.

They are training documents only, and the same ones in every run: those with the lowest digests, until there
are enough characters. A heap holds no more than these.
"""

import heapq

from narrowgauge.trainer.data.preparation.encode import ReadDocument

TRAINING_CHARACTERS = 8 << 20  # more text changes the merges little, but costs time and memory


class TrainingTexts:
    """The texts of a first reading of the training documents to train a tokenizer on."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []  # (-digest, number, text); the highest digest first
        self._characters = self._number = 0  # sum over the heap, and documents so far

    def add(self, document: ReadDocument) -> None:
        """Offer the next document: keep the fewest with the lowest digests that suffice."""
        self._number += 1
        heapq.heappush(self._heap, (-int.from_bytes(document.digest, "big"), self._number, document.text))
        self._characters += len(document.text)
        while self._characters - len(self._heap[0][2]) >= TRAINING_CHARACTERS:
            self._characters -= len(heapq.heappop(self._heap)[2])

    def texts(self) -> list[str]:
        """The texts in source order."""
        left, chosen = TRAINING_CHARACTERS, list[tuple[int, str]]()
        for _, number, text in sorted(self._heap, reverse=True):
            chosen.append((number, text[:left]))
            left -= len(text[:left])
        return [text for _, text in sorted(chosen)]

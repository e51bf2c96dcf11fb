"""Streams of tokens, and the documents in them.

A stream is the tokens of one file, of several files one after the other, or of a range of them. It is read by
position and never held in memory: its arrays are memory-mapped files.

A *document* begins at a position of the index (Megatron's) or, without an index, at a boundary id: at the id
itself if the layout puts it before a document (llm.c's, ours), or at the next token if it comes after one
(nanoGPT's). A model may be trained with separate documents. Then a token attends to its own document
only, and its position is counted from the start of that document. The positions define the attention mask:
token i attends to exactly the last position(i) + 1 tokens.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.trainer.data.token_files.token_file import Tokens
from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens, read by position; `first` and `last` are positions in the concatenated arrays."""

    arrays: tuple[Tokens, ...]  # the tokens of the files, in order
    boundaries: tuple[int, ...] = ()  # the ids between documents
    boundary_first: bool = True  # whether a boundary id comes before its document
    starts: NDArray[np.int64] | None = None  # of the documents in the concatenated arrays, if indexed
    first: int = 0
    last: int | None = None  # after the last token; None: the end

    @cached_property
    def _offsets(self) -> list[int]:
        """The start of each array, and the end of the last."""
        return [0, *accumulate(map(len, self.arrays))]

    def __len__(self) -> int:
        return (self._offsets[-1] if self.last is None else self.last) - self.first

    def __getitem__(self, part: slice) -> NDArray[np.integer[Any]]:
        """The tokens in a range of positions, as an array of the file's dtype."""
        start, stop, _ = part.indices(len(self))
        start, stop = start + self.first, stop + self.first
        number = bisect_right(self._offsets, start, hi=len(self.arrays)) - 1
        parts = []
        while start < stop:
            begin, end = self._offsets[number : number + 2]
            parts.append(self.arrays[number][start - begin : min(stop, end) - begin])
            start, number = end, number + 1
        if len(parts) == 1:
            return np.asarray(parts[0])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def substream(self, start: int, stop: int) -> "TokenStream":
        """The stream of the tokens at `start` to `stop` - 1."""
        assert 0 <= start <= stop <= len(self)
        return replace(self, first=self.first + start, last=self.first + stop)

    def positions(self, start: int, row: NDArray[Any]) -> NDArray[np.int64]:
        """Position of each token in its document, counted from the start of the row at the earliest."""
        begins = self._begins(start, row)
        number_T = np.arange(len(row), dtype=np.int64)
        begin_T = np.zeros_like(number_T)
        begin_T[begins] = begins
        return number_T - np.maximum.accumulate(begin_T)

    def documents(self, at_once: int = 1 << 20) -> Iterator[NDArray[Any]]:
        """Each document without the ids between documents, which are sought in `at_once` tokens at a time."""
        parts = (self._starts(start, start + at_once).tolist() for start in range(0, len(self), at_once))
        for start, stop in pairwise(chain([0], chain.from_iterable(parts), [len(self)])):
            if start < stop:
                document = self[start:stop]
                begin = int(document[0] in self.boundaries)
                ends_so = len(document) > begin and document[-1] in self.boundaries
                yield document[begin : len(document) - int(ends_so)]

    def next_start(self, start: int, within: int) -> int:
        """The first position from `start` on where a document begins; `start` itself if none is nearby."""
        return next(map(int, self._starts(start, start + within)), start)

    def _starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """The positions from `start` to `stop` - 1 at which documents begin."""
        before = max(start - 1, 0)  # a boundary may be the id before a document
        begins = before + self._begins(before, self[before:stop])
        return begins[begins >= start]

    def _begins(self, start: int, row: NDArray[Any]) -> NDArray[np.int64]:
        """The indices in a row, read at `start`, at which documents begin."""
        if self.starts is not None:
            at = self.first + start
            low, high = np.searchsorted(self.starts, [at, at + len(row)])
            return self.starts[low:high] - at
        begins = np.flatnonzero(np.isin(row, self.boundaries)) + (not self.boundary_first)
        return begins[begins < len(row)]


@dataclass(frozen=True)
class Mixture:
    """Streams, each with its share of `sample_order.BLOCK` samples; a single stream may have any share."""

    streams: tuple[TokenStream, ...]
    shares: tuple[int, ...] = (1,)

    def __len__(self) -> int:
        """The number of tokens in all streams."""
        return sum(map(len, self.streams))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and held-out tokens, their tokenizer, and a digest of all three."""

    tokenizer: Tokenizer
    train: Mixture
    val: Mixture
    digest: str


def as_mixture(tokens: "Mixture | TokenStream | Tokens") -> Mixture:
    """The tokens as a mixture, which is what loaders read."""
    if isinstance(tokens, Mixture):
        return tokens
    stream = tokens if isinstance(tokens, TokenStream) else TokenStream((tokens,))
    return Mixture((stream,))

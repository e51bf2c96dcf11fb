"""Our token files, in llm.c's layout, and streams of the tokens in files of any layout.

**Files.** llm.c and its descendants can read our files, and we can read theirs. All values are little-endian:

| bytes       | content                                                                                 |
|-------------|-----------------------------------------------------------------------------------------|
| 0 to 1023   | 256 x int32: magic, version, token count, then zeros                                    |
| 1024 to end | the tokens, one after another; before each document its end-of-document id              |

Magic 20240520, version 1: uint16 tokens. Magic 20240801, version 7: uint32 tokens, for vocabularies of more
than 65536 ids. The file is exactly 1024 + count x itemsize bytes long. This is checked whenever a file is
opened, because a truncated file would otherwise silently map as fewer tokens.

llm.c's own loader reads only the first kind and seeks with an int, so files for it must stay below 2 GiB. Its
scripts cut a large corpus into *shards* of 100 million tokens, and so does `prepare --layout llmc`.

Source: `dev/data/` and `llmc/dataloader.h` of github.com/karpathy/llm.c.

**Streams.** A stream is the tokens of one file, of several files one after the other, or of a range of them.
It is read by position and never held in memory: its arrays are memory-mapped files.

A *document* begins at a position of the index (Megatron's) or, without an index, at a boundary id: at the id
itself if the layout puts it before a document (llm.c's, ours), or at the next token if it comes after one
(nanoGPT's). A model may be trained with separate documents. Then a token attends to its own document
only, and its position is counted from the start of that document. The positions define the attention mask:
token i attends to exactly the last position(i) + 1 tokens.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain, count, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import sha256_of, staged_file
from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer

HEADER_BYTES = 1024
MOST_TOKENS = 2**31 - 1  # the count is an int32
SHARD_TOKENS = 100_000_000
_CHUNK = 1 << 22  # tokens checked at once

# Magic bytes of files that are refused: the zip archive that `torch.save` writes, and a pickle of protocol 2
# or later, which starts with the PROTO opcode (source: Python's `pickletools`).
ZIP = b"PK\x03\x04"
PICKLE = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))


class LlmcMagic(IntEnum):
    """The first integer of each kind of llm.c file, a little-endian int32."""

    GPT2_MODEL = 20240326
    DEBUG_STATE = 20240327
    TOKENIZER = 20240328
    TOKENS = 20240520
    EVALUATION = 20240522
    TRAINING_STATE = 20240527
    LLAMA3_TOKENS = 20240801
    LLAMA3_MODEL = 20240803

    @property
    def kind(self) -> str:
        """The kind of file in words."""
        return self.name.lower().replace("_", " ")


_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (LlmcMagic.TOKENS, 1): np.dtype("<u2"),
    (LlmcMagic.LLAMA3_TOKENS, 7): np.dtype("<u4"),
}

Tokens = NDArray[np.integer[Any]]
Fault = Callable[[Path, str], UserError]


class TokenFile(BaseModel):
    """Facts of a token file when it was written."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    tokens: int
    sha256: str


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A token file: its ids, memory-mapped, and the layout's facts on documents, targets and vocabulary."""

    path: Path  # the file with the ids
    layout: str
    tokens: Tokens
    beside: tuple[Path, ...] = ()  # the other files that belong to it
    boundary_first: bool | None = False  # whether the id between documents is before one; None: see file
    starts: NDArray[np.int64] | None = None  # of the documents, if the layout has an index
    vocabulary: tuple[int, int] | None = None  # (size, id between documents), if the layout states them
    tokenizer: str | None = None  # its name, if the layout states it


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype of the layout that can hold every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes ids in [0, vocab_size), `most` to each file but the last; a file appears in full or not at all.

    The first of `paths` is always written; `vocab_size` selects the dtype.
    """

    _path: Path

    def __init__(self, paths: Iterable[Path], vocab_size: int, most: int = MOST_TOKENS) -> None:
        assert 1 <= most <= MOST_TOKENS
        self.paths, self.vocab_size, self.most = iter(paths), vocab_size, most
        self.written = list[TokenFile]()  # the files that are complete
        self._stack, self._dtype = ExitStack(), token_dtype(vocab_size)
        self._begin()

    def write(self, ids: NDArray[Any]) -> None:
        """Append ids; a `UserError` if there are more than all files may hold."""
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.vocab_size)
        while ids.size:
            if self._count == self.most:
                self._end()
                self._begin()
            part = ids[: self.most - self._count]
            self._file.write(part.astype(self._dtype, copy=False).tobytes())
            self._count += part.size
            ids = ids[part.size :]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._end()
        self._stack.__exit__(kind, error, trace)

    def _begin(self) -> None:
        path = next(self.paths, None)
        if path is None:
            raise UserError(
                f"{self._path} would hold more than {self.most} tokens, the limit for one file; split it"
            )
        self._path, self._count = path, 0
        self._file = self._stack.enter_context(staged_file(path))
        self._file.write(bytes(HEADER_BYTES))  # the count is known at the end

    def _end(self) -> None:
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        magic, version = next(key for key, of_key in _DTYPES.items() if of_key == self._dtype)
        header[:3] = magic, version, self._count
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._stack.close()
        self.written.append(TokenFile(name=self._path.name, tokens=self._count, sha256=sha256_of(self._path)))


def write_token_file(path: Path, chunks: Iterable[NDArray[Any]], vocab_size: int) -> TokenFile:
    """Write the concatenated chunks of ids as one file; one chunk at a time is in memory."""
    with TokenWriter([path], vocab_size) as writer:
        for chunk in chunks:
            writer.write(chunk)
    return writer.written[0]


def shard_paths(directory: Path, stem: str) -> Iterator[Path]:
    """STEM_000000.bin, STEM_000001.bin ... in a directory."""
    return (directory / f"{stem}_{number:06}.bin" for number in count())


def open_token_file(path: Path, expected: TokenFile | None = None, vocab_size: int | None = None) -> Tokens:
    """The tokens of `path`, memory-mapped and read-only: uint16 or uint32 of shape (count,).

    Args:
        path: The file.
        expected: The facts recorded when it was written, with which all of it is compared; None = it is
            another program's.
        vocab_size: All ids must be below it; None = they are not read.

    Raises:
        UserError: the file is not in this layout, its length does not agree with its header, or it is not
            the expected one.
    """
    fault: Fault = damaged if expected else unfit
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise fault(path, f"it cannot be read ({error.strerror})") from None
    if len(raw) < HEADER_BYTES:
        raise fault(path, f"it has {len(raw)} bytes, but the header alone has {HEADER_BYTES}")
    magic, version, count = (int(value) for value in np.frombuffer(raw, "<i4", count=3))
    dtype = _DTYPES.get((magic, version))
    if dtype is None or count < 0:
        raise fault(
            path, f"it does not begin like a token file (magic {magic}, version {version}, {count} tokens)"
        )
    size, right_size = path.stat().st_size, HEADER_BYTES + count * dtype.itemsize
    if size != right_size:
        raise fault(path, f"its header promises {count} tokens, so {right_size} bytes, and it has {size}")
    if expected is not None and count != expected.tokens:
        raise fault(path, f"it holds {count} tokens, but {expected.tokens} were written")
    if count == 0:
        raise fault(path, "it holds no tokens")
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    if vocab_size is not None:
        check_ids(path, tokens, vocab_size, fault)
    if expected is not None and sha256_of(path, follow_links=True) != expected.sha256:
        raise fault(path, "its sha256 has changed since it was written")
    return tokens


def check_ids(path: Path, tokens: Tokens, vocab_size: int, fault: Fault) -> None:
    """Check that all ids are in [0, vocab_size); the `UserError` gives the first position that is not."""
    for start in range(0, len(tokens), _CHUNK):
        chunk = np.asarray(tokens[start : start + _CHUNK])
        beyond = (chunk >= vocab_size) | (chunk < 0)
        if beyond.any():
            position = start + int(beyond.argmax())
            found = f"token {position} has id {tokens[position]}"
            raise fault(path, f"{found}, but the vocabulary ends at {vocab_size - 1}")


def damaged(path: Path, what: str) -> UserError:
    """The error for a prepared file that has changed since it was written, with the way out."""
    return UserError(
        f"{path} is damaged: {what}; delete the directory {path.parent} and prepare it again, "
        "by running the same command"
    )


def unfit(path: Path, what: str, remedy: str = "copy the file again, or create it again") -> UserError:
    """The error for another program's token file that cannot be read, with the way out."""
    return UserError(f"{path} cannot be read as tokens: {what}; {remedy}")


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

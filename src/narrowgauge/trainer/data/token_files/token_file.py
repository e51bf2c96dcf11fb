"""Our token files, in llm.c's layout: llm.c and its descendants can read our files, and we can read theirs.

All values are little-endian:

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
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import sha256_of, staged_file

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

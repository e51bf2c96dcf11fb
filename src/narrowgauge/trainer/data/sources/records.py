"""Documents, the chunks of a source that contain them, and the bytes of its files.

One process reads a source, and many parse it. The reader cuts the files into *chunks* of about a megabyte
without parsing them. Each chunk is sent to a worker, where `records` makes documents and rejected records of
it. These depend on the chunk alone, so it does not matter which worker parses it, or when.

A file may be compressed, truncated, or all one line. `ByteStream` yields its decompressed bytes in blocks of
at most about a megabyte, whatever the compression ratio. Several compressed streams in one file (multistream
.bz2, members of .gz, frames of .zst) are read one after the other. A file that ends before its compressed
data does raises a `TruncatedError`. `chunks_of` divides the bytes after a mark (the end of a line or a page)
into chunks of complete records, and holds at most one chunk and one record in memory.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from narrowgauge.system.errors import UserError

CHUNK_BYTES = 1 << 20  # sent to a worker at once
MOST_BYTES = 32 << 20  # in one record: a longer one is more likely a broken file than a text

SET_ASIDE = "fix it, or set such records aside with `narrowgauge prepare --tolerant`"
NAME_KEY = "name its key or column with `narrowgauge prepare --text-key`"

_READ = 1 << 18
_READ_ZST = 1 << 13  # zstd decompresses a block at once, to up to 32 thousand times its size
_MOST_WINDOW = 1 << 31  # bytes of memory for `zstd --long=31`, as large crawls are compressed
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = (*_OPENERS, ".zst")


@dataclass(frozen=True)
class Document:
    """One text, which is trained on or held out as a whole; name and text decide which."""

    name: str  # path below the source, or title; "" for a record of a table
    text: str


@dataclass(frozen=True)
class Rejected:
    """A record that cannot become a document: its location, the reason, and the way out."""

    where: str
    reason: str
    remedy: str = SET_ASIDE

    def __str__(self) -> str:
        return f"{self.where} {self.reason}; {self.remedy}"


Records = Iterator[Document | Rejected]
#: The documents of a record, from its file, its first line, its bytes, and whether a mark ends it.
Parse = Callable[[Path, int, bytes, bool], Records]


@dataclass(frozen=True)
class Input:
    """A file of a source: its name below the source, its path, and how it is read."""

    name: str
    path: Path
    type: str = "text"


@dataclass(frozen=True)
class Chunk:
    """A portion of a source, sent to a worker."""

    size: int  # bytes of the source's files that it covers
    records: Callable[[], Records]  # its documents and rejected records in their order; can be pickled


@dataclass(frozen=True)
class Source:
    """A source of text."""

    name: str  # as given by the user
    inputs: tuple[Input, ...]  # its files, in order
    chunks: Callable[[Sequence[Input]], Iterator[Chunk]]  # reads the inputs from the start
    identity: str = ""  # identifies the content if there are no files to digest


def document(where: str, name: str, text: object) -> Records:
    """The document of a text or its UTF-8, nothing for white space, or the rejected record and why."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        elif isinstance(text, str) and not text.isascii():
            text.encode("utf-8")
    except UnicodeDecodeError as error:
        yield not_utf8(where, error.start, error.object[error.start])
        return
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X} at character {error.start}"
        yield Rejected(where, f"holds half a surrogate pair ({half}), which UTF-8 cannot encode")
        return
    if not isinstance(text, str):
        yield Rejected(where, f"has a {type(text).__name__} where a text belongs")
    elif "\x00" in text:
        yield Rejected(where, f"holds a NUL byte (character {text.index(chr(0))}), so it is not text")
    elif text and not text.isspace():
        yield Document(name, text)


def not_utf8(where: str, position: object, byte: int, remedy: str = SET_ASIDE) -> Rejected:
    """The record that is rejected for a byte at a position."""
    return Rejected(where, f"is not UTF-8: byte {position} is 0x{byte:02x}", remedy)


def refusal(where: str, reason: str, remedy: str = SET_ASIDE, size: int = 0) -> Chunk:
    """A chunk of one rejected record, for input that the reader itself cannot read."""
    return Chunk(size, partial(iter, (Rejected(where, reason, remedy),)))


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for an input file that the operating system does not let us read."""
    return UserError(f"cannot read {path}: {error.strerror}; fix its permissions or leave it out")


def package(name: str, what: str, extra: str = "data") -> Any:
    """A package that reads `what`, imported; a `UserError` names the extra that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(
            f"{what} needs the package {name.partition('.')[0]}; python -m pip install 'narrowgauge[{extra}]'"
        ) from None


class TruncatedError(Exception):
    """A compressed file is damaged or ends before its data."""


class ByteStream:
    """The decompressed bytes of a file, in blocks."""

    def __init__(self, path: Path) -> None:
        self.path, self._read, self._counted = path, 0, 0

    def __iter__(self) -> Iterator[bytes]:
        """The decompressed blocks.

        Raises:
            TruncatedError: the compressed data is damaged or incomplete.
        """
        suffix = self.path.suffix.lower()
        try:
            with self.path.open("rb") as file:
                opened: Any = _OPENERS.get(suffix, lambda file: file)(file)
                # `read1` gives all that precedes a damaged place.
                for block in _zstd(file) if suffix == ".zst" else iter(partial(opened.read1, _READ), b""):
                    self._read = file.tell()
                    yield block
            if not self._read and suffix in COMPRESSED:
                raise EOFError
        except EOFError:
            raise TruncatedError("ends before its compressed data does") from None
        except (OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(self.path, error) from None
            raise TruncatedError(f"is damaged ({error})") from None

    def head(self, size: int) -> bytes:
        """The first bytes; fewer of a file that is damaged there."""
        head = b""
        with suppress(TruncatedError):
            for block in self:
                head += block
                if len(head) >= size:
                    break
        return head[:size]

    def advance(self) -> int:
        """The number of bytes of the file itself that were read since the last call."""
        before, self._counted = self._counted, self._read
        return self._counted - before


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """The frames of a .zst; the package's own reader does not notice that the last one is cut."""
    zstandard, decoder = package("zstandard", "a .zst file"), None
    while data := file.read(_READ_ZST):
        while data:
            decoder = decoder or zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).decompressobj()
            try:
                out = decoder.decompress(data)
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None
            yield from (out[start : start + CHUNK_BYTES] for start in range(0, len(out), CHUNK_BYTES))
            data = b""
            if decoder.eof:
                data, decoder = decoder.unused_data.lstrip(b"\x00"), None  # padding, as on tapes
    if decoder is not None:
        raise EOFError


def _parse_each(path: Path, mark: bytes, parse: Parse, line: int, data: bytes) -> Records:
    """The documents of complete records, the first of which begins on a line."""
    records = data.split(mark)
    for number, record in enumerate(records, 1):
        yield from parse(path, line, record, number < len(records))
        line += record.count(b"\n") + mark.count(b"\n")


def chunks_of(
    stream: ByteStream,
    mark: bytes,
    unit: str,
    parse: Parse,
    blocks: Iterable[bytes] | None = None,
) -> Iterator[Chunk]:
    """Cut a stream into chunks of complete records, which end after a mark; the last may lack it.

    What comes before a damaged place is read. The damage is a rejected record, and so is a record too long.

    Args:
        stream: The stream.
        mark: The bytes at the end of a record.
        unit: Begins the sentence about a record that is too long.
        parse: The documents of a record; can be pickled.
        blocks: What the bytes of the stream were converted to; None: these bytes.
    """
    buffer, line, enough, in_long, damage = bytearray(), 1, CHUNK_BYTES, False, ""

    def take(size: int) -> bytes:
        nonlocal line
        data = bytes(buffer[:size])
        del buffer[:size]
        line += data.count(b"\n")
        return data

    def chunk(size: int) -> Chunk:
        return Chunk(stream.advance(), partial(_parse_each, stream.path, mark, parse, line, take(size)))

    try:
        for block in stream if blocks is None else blocks:
            buffer += block
            if len(buffer) < enough:
                continue
            if in_long:  # drop it up to its end, of which the last bytes may be a part
                end = buffer.find(mark)
                in_long = end < 0
                take(max(len(buffer) - len(mark) + 1, 0) if in_long else end + len(mark))
            if complete := len(buffer) - len(buffer.rpartition(mark)[2]):
                yield chunk(complete)
            elif len(buffer) > MOST_BYTES:
                in_long = True
                reason = f"{unit} of more than {MOST_BYTES >> 20} MiB, the limit for one document"
                yield refusal(f"{stream.path}:{line}", reason, size=stream.advance())
            enough = len(buffer) + CHUNK_BYTES
    except TruncatedError as error:
        damage = str(error)
    if in_long:
        take(buffer.index(mark) + len(mark) if mark in buffer else len(buffer))
    if complete := len(buffer) - len(buffer.rpartition(mark)[2]) if damage else len(buffer):
        yield chunk(complete)
    if damage:
        yield refusal(f"{stream.path}:{line}", damage)

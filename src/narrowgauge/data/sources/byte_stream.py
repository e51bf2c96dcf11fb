"""Reads the bytes of a file that may be compressed, truncated, or all one line.

`ByteStream` yields the decompressed bytes of a file in blocks of at most about a megabyte, whatever the
compression ratio. Several compressed streams in one file (multistream .bz2, members of .gz, frames of .zst)
are read one after the other. A file that ends before its compressed data does raises a `TruncatedError`.

`cut` divides the bytes after a mark (the end of a line or a page) into portions of complete records. It holds
at most one portion and one record in memory.
"""

import bz2
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.data.sources.records import CHUNK_BYTES, MOST_BYTES
from narrowgauge.errors import UserError

COMPRESSED = (".gz", ".bz2", ".zst")
_READ = 1 << 18
_READ_ZST = 1 << 13  # zstd decompresses a block at once, to up to 32 thousand times its size
_MOST_WINDOW = 1 << 31  # bytes of memory for `zstd --long=31`, as large crawls are compressed


class TruncatedError(Exception):
    """A compressed file is damaged or ends before its data."""


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for an input file that the operating system does not let us read."""
    return UserError(f"cannot read {path}: {error.strerror}; fix its permissions or leave it out")


class _Decoder(Protocol):
    eof: bool
    unused_data: bytes

    def blocks(self, data: bytes) -> Iterator[bytes]: ...


class ByteStream:
    """The decompressed bytes of a file, in blocks; `consumed` counts the bytes of the file itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.consumed = path, 0

    def __iter__(self) -> Iterator[bytes]:
        """The decompressed blocks.

        Raises:
            UserError: the file cannot be read.
            TruncatedError: the compressed data is damaged or incomplete.
        """
        suffix = self.path.suffix.lower()
        raw = self.raw(_READ_ZST if suffix == ".zst" else _READ)
        return self._decompressed(_decoder(suffix), raw) if suffix in COMPRESSED else raw

    def raw(self, size: int) -> Iterator[bytes]:
        """The bytes of the file without decompression, in blocks of `size`; raises as iteration does."""
        try:
            with self.path.open("rb") as file:
                while data := file.read(size):
                    self.consumed += len(data)
                    yield data
        except OSError as error:
            raise unreadable(self.path, error) from None

    def _decompressed(self, new: Callable[[], _Decoder], raw: Iterator[bytes]) -> Iterator[bytes]:
        decoder: _Decoder | None = None
        for data in raw:
            while data:
                decoder = decoder or new()
                yield from decoder.blocks(data)
                data = b""
                if decoder.eof:
                    data, decoder = decoder.unused_data, None
                    if not data.strip(b"\x00"):  # padding after the last stream, as on tapes
                        data = b""
        if decoder is not None or not self.consumed:
            raise TruncatedError("ends before its compressed data does")


def _decoder(suffix: str) -> Callable[[], _Decoder]:
    if suffix == ".zst":
        return _zstd()
    return _Gzip if suffix == ".gz" else _Bzip2


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    eof = property(lambda self: self._inner.eof)
    unused_data = property(lambda self: self._inner.unused_data)

    def blocks(self, data: bytes) -> Iterator[bytes]:
        try:
            while data and not self._inner.eof:
                yield self._inner.decompress(data, CHUNK_BYTES)
                data = self._inner.unconsumed_tail
        except zlib.error as error:
            raise TruncatedError(f"is damaged ({error})") from None


class _Bzip2:
    def __init__(self) -> None:
        self._inner = bz2.BZ2Decompressor()

    eof = property(lambda self: self._inner.eof)
    unused_data = property(lambda self: self._inner.unused_data)

    def blocks(self, data: bytes) -> Iterator[bytes]:
        try:
            yield self._inner.decompress(data, CHUNK_BYTES)
            while not (self._inner.eof or self._inner.needs_input):
                yield self._inner.decompress(b"", CHUNK_BYTES)
        except OSError as error:
            raise TruncatedError(f"is damaged ({error})") from None


def _zstd() -> Callable[[], _Decoder]:
    try:
        import zstandard
    except ImportError:
        raise UserError("a .zst file needs the package zstandard; python -m pip install zstandard") from None

    class Zstd:
        def __init__(self) -> None:
            self._inner: Any = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).decompressobj()

        eof = property(lambda self: self._inner.eof)
        unused_data = property(lambda self: self._inner.unused_data)

        def blocks(self, data: bytes) -> Iterator[bytes]:
            try:
                out = self._inner.decompress(data)
                for start in range(0, len(out), CHUNK_BYTES):
                    yield out[start : start + CHUNK_BYTES]
            except zstandard.ZstdError as error:
                raise TruncatedError(f"is damaged ({error})") from None

    return Zstd


@dataclass(frozen=True)
class Portion:
    """Complete records of a stream, or (`data` None) the location of one that is too long."""

    data: bytes | None
    first_line: int  # line number of the first byte, counted from 1
    size: int  # bytes of the file, as stored, that were read for it


def cut(stream: ByteStream, mark: bytes, blocks: Iterator[bytes] | None = None) -> Iterator[Portion]:
    """Cut a stream, or the `blocks` that its bytes were converted to, into portions that end after a mark.

    The last record may lack the mark.

    Raises:
        UserError, TruncatedError: as iteration over a `ByteStream`, once all complete records before the
            damage have been yielded.
    """
    cutter = _Cutter(stream, mark)
    try:
        for block in blocks or iter(stream):
            yield from cutter.add(block)
    except TruncatedError:
        yield from cutter.complete_records()
        raise
    yield from cutter.rest()


class _Cutter:
    """The bytes not yet yielded, and how far they have been searched for the mark."""

    def __init__(self, stream: ByteStream, mark: bytes) -> None:
        self.stream, self.mark = stream, mark
        self.buffer, self.searched, self.skipping = bytearray(), 0, False
        self.line, self.reported = 1, 0

    def add(self, block: bytes) -> Iterator[Portion]:
        self.buffer += block
        if self.skipping:
            self._skip()
        if self.skipping or len(self.buffer) < CHUNK_BYTES:
            return
        any_complete = yield from self.complete_records()
        if not any_complete and len(self.buffer) > MOST_BYTES:
            self.skipping = True
            yield self._portion(None)

    def complete_records(self) -> Generator[Portion, None, bool]:
        """Yield the records that end with a mark; returns whether there are any."""
        end = -1 if self.skipping else self.buffer.rfind(self.mark, self.searched)
        if end < 0:
            self.searched = max(len(self.buffer) - len(self.mark) + 1, 0)
            return False
        yield self._portion(self._take(end + len(self.mark)))
        return True

    def rest(self) -> Iterator[Portion]:
        """The bytes after the last mark."""
        if self.buffer and not self.skipping:
            yield self._portion(None if len(self.buffer) > MOST_BYTES else bytes(self.buffer))

    def _skip(self) -> None:
        end = self.buffer.find(self.mark)
        self.skipping = end < 0
        skipped = len(self.buffer) - len(self.mark) + 1 if self.skipping else end + len(self.mark)
        self.line += self._take(max(skipped, 0)).count(b"\n")

    def _take(self, size: int) -> bytes:
        data = bytes(memoryview(self.buffer)[:size])
        del self.buffer[:size]
        self.searched = 0
        return data

    def _portion(self, data: bytes | None) -> Portion:
        portion = Portion(data, self.line, self.stream.consumed - self.reported)
        self.reported = self.stream.consumed
        self.line += data.count(b"\n") if data is not None else 0
        return portion

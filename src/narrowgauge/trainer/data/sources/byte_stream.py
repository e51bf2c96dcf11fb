"""Reads the bytes of a file that may be compressed, truncated, or all one line.

`ByteStream` yields the decompressed bytes of a file in blocks of at most about a megabyte, whatever the
compression ratio. Several compressed streams in one file (multistream .bz2, members of .gz, frames of .zst)
are read one after the other. A file that ends before its compressed data does raises a `TruncatedError`.

`chunks_of` divides the bytes after a mark (the end of a line or a page) into chunks of complete records. It
holds at most one chunk and one record in memory.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.sources.records import CHUNK_BYTES, MOST_BYTES, Chunk, Records, package, refusal

_READ = 1 << 18
_READ_ZST = 1 << 13  # zstd decompresses a block at once, to up to 32 thousand times its size
_MOST_WINDOW = 1 << 31  # bytes of memory for `zstd --long=31`, as large crawls are compressed
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = (*_OPENERS, ".zst")


class TruncatedError(Exception):
    """A compressed file is damaged or ends before its data."""


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for an input file that the operating system does not let us read."""
    return UserError(f"cannot read {path}: {error.strerror}; fix its permissions or leave it out")


class ByteStream:
    """The decompressed bytes of a file, in blocks; `consumed` counts the bytes of the file itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.consumed = path, 0

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
                    self.consumed = file.tell()
                    yield block
            if not self.consumed and suffix in COMPRESSED:
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


# (complete records, line number of their first byte) -> their documents
Parse = Callable[[bytes, int], Records]


def chunks_of(
    stream: ByteStream, mark: bytes, unit: str, parse: Parse, blocks: Iterable[bytes] | None = None
) -> Iterator[Chunk]:
    """Cut a stream into chunks of complete records, which end after a mark; the last may lack it.

    What comes before a damaged place is read. The damage is a rejected record, and so is a record too long.

    Args:
        stream: The stream.
        mark: The bytes at the end of a record.
        unit: Begins the sentence about a record that is too long.
        parse: Reads the records of a chunk; can be pickled.
        blocks: What the bytes of the stream were converted to; None: these bytes.
    """
    buffer, line, reported, is_long, enough = bytearray(), 1, 0, False, CHUNK_BYTES
    damage: TruncatedError | None = None

    def take(size: int) -> bytes:
        nonlocal line
        data = bytes(memoryview(buffer)[:size])
        del buffer[:size]
        line += data.count(b"\n")
        return data

    remaining = iter(stream if blocks is None else blocks)
    is_end = False
    while not is_end:
        try:
            block = next(remaining, None)
        except TruncatedError as error:
            block, damage = None, error
        is_end = block is None
        buffer += block or b""
        if not is_end and len(buffer) < enough:
            continue
        if is_long:
            end = buffer.find(mark)
            is_long = end < 0
            take(max(len(buffer) - len(mark) + 1, 0) if is_long else end + len(mark))
        size, end = stream.consumed - reported, buffer.rfind(mark)
        if not is_long and end >= 0:
            first, reported = line, stream.consumed
            yield Chunk(size, partial(parse, take(end + len(mark)), first))
        elif not is_long and len(buffer) > MOST_BYTES:
            is_long, reported = True, stream.consumed
            reason = f"{unit} of more than {MOST_BYTES >> 20} MiB, the limit for one document"
            yield refusal(f"{stream.path}:{line}", reason, size=size)
        enough = len(buffer) + CHUNK_BYTES
    if damage:
        yield refusal(f"{stream.path}:{line}", str(damage))
    elif buffer and not is_long:
        yield Chunk(stream.consumed - reported, partial(parse, bytes(buffer), line))

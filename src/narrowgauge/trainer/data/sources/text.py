"""Text files: each is a document, or one file is cut into pieces that are documents.

A single file is cut because a tenth of every corpus is held out *by document*, and a novel in one file would
otherwise be one document. Concatenated, the pieces are the file again.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from narrowgauge.trainer.data.sources.records import (
    CHUNK_BYTES,
    ByteStream,
    Chunk,
    Input,
    Records,
    Rejected,
    TruncatedError,
    document,
    not_utf8,
    refusal,
)

MOST_UNCUT = 64 << 20  # bytes: a longer file is cut, even if it is one of many

PIECE_ENOUGH = 4096  # characters after which a blank line ends the piece,
_PIECE_LONG = 12288  # after which any line does,
_PIECE_MOST = 16384  # and the most of one line
_ESCAPED = re.compile("[\udc80-\udcff]")
_CONVERT = "convert it to UTF-8 or leave it out"


def text_files(files: Iterable[Input]) -> Iterator[Chunk]:
    """Chunks of several files, each file a document; files too long for that are cut into pieces."""
    inputs, size = list[Input](), 0
    for file in files:
        file_size = file.path.stat().st_size
        is_long = file_size > MOST_UNCUT
        if not is_long:
            inputs.append(file)
            size += file_size
        if inputs and (is_long or size >= CHUNK_BYTES):
            yield Chunk(size, partial(_whole, inputs))
            inputs, size = [], 0
        if is_long:
            yield from text_pieces(file)
    if inputs:
        yield Chunk(size, partial(_whole, inputs))


def _whole(files: Sequence[Input]) -> Records:
    """A document for each file."""
    for file in files:
        where = str(file.path)
        try:
            text = b"".join(ByteStream(file.path)).decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            yield not_utf8(where, error.start, error.object[error.start], _CONVERT)
        except TruncatedError as damage:
            yield Rejected(where, str(damage))
        else:
            before, nul, _ = text.partition("\x00")
            yield from document(f"{where}:{before.count(chr(10)) + 1}" if nul else where, file.name, text)


def text_pieces(file: Input) -> Iterator[Chunk]:
    """A file, read in blocks and cut between paragraphs if possible, otherwise between lines.

    A byte that is not UTF-8 rejects its piece, but not the pieces after it.
    """
    stream, number, damage = ByteStream(file.path), 0, ""
    at = len(codecs.BOM_UTF8) * (stream.head(3) == codecs.BOM_UTF8)  # bytes before the texts
    texts, size = list[str](), 0
    try:
        # A byte that is not UTF-8 becomes U+DC00 + byte, unused in any text.
        for text in cut_text(codecs.iterdecode(stream, "utf-8-sig", "surrogateescape")):
            texts.append(text)
            size += len(text)
            if size >= CHUNK_BYTES:
                yield Chunk(stream.advance(), partial(_pieces, file, texts, number, at))
                number, at = number + len(texts), at + _size(texts)
                texts, size = [], 0
    except TruncatedError as error:
        damage = str(error)
    yield Chunk(stream.advance(), partial(_pieces, file, texts, number, at))
    if damage:
        yield refusal(str(file.path), damage)


def _pieces(file: Input, texts: Sequence[str], first: int, position: int) -> Records:
    """A document for each piece, numbered from `first`, which begins at byte `position`."""
    for number, text in enumerate(texts, first):
        if not text.isascii() and (bad := _ESCAPED.search(text)):
            before = position + _size([*texts[: number - first], text[: bad.start()]])
            yield not_utf8(str(file.path), before, ord(bad[0]) - 0xDC00, _CONVERT)
        else:
            yield from document(f"{file.path}, piece {number},", f"{file.name}#{number}", text)


def _size(texts: Iterable[str]) -> int:
    """The number of bytes that the texts were decoded from."""
    return sum(len(text.encode("utf-8", "surrogateescape")) for text in texts)


def cut_text(blocks: Iterable[str]) -> Iterator[str]:
    """The text of `blocks` in pieces of whole paragraphs, about 4 to 16 thousand characters."""
    size, piece = 0, list[str]()
    for line in _lines(blocks):
        piece.append(line)
        size += len(line)
        if size >= _PIECE_LONG or (size >= PIECE_ENOUGH and line.isspace()):
            yield "".join(piece)
            size, piece = 0, []
    if piece:
        yield "".join(piece)


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """The lines with their endings; a line longer than the limit of a piece is split."""
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).splitlines(keepends=True) or [""]
        # The last line may continue in the next block, if only with the \n of a \r\n: yield full parts only.
        full = (len(rest) - 1) // _PIECE_MOST * _PIECE_MOST if rest else 0
        for line in [*lines, rest[:full]]:
            yield from _parts(line)
        rest = rest[full:]
    yield from _parts(rest)


def _parts(line: str) -> Iterator[str]:
    for start in range(0, len(line), _PIECE_MOST):
        yield line[start : start + _PIECE_MOST]

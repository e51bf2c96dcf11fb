"""Text files: each is a document, or one file is cut into pieces that are documents.

A single file is cut because a tenth of every corpus is held out *by document*, and a novel in one file would
otherwise be one document. Concatenated, the pieces are the file again.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from narrowgauge.trainer.data.sources.byte_stream import ByteStream, TruncatedError
from narrowgauge.trainer.data.sources.records import (
    CHUNK_BYTES,
    Chunk,
    Input,
    Records,
    Rejected,
    document,
    refusal,
)

MOST_UNCUT = 64 << 20  # bytes: a longer file is cut, even if it is one of many

PIECE_ENOUGH = 4096  # characters after which a blank line ends the piece,
_PIECE_LONG = 12288  # after which any line does,
_PIECE_MOST = 16384  # and the most of one line
_ESCAPED = re.compile("[\udc80-\udcff]")
_CONVERT = "convert it to UTF-8 or leave it out"


def text_files(files: Sequence[Input], skip: bool = False) -> Iterator[Chunk]:
    """Chunks of several files, each file a document; files too long for that are cut into pieces."""
    inputs, size = list[Input](), 0
    for file in files:
        file_size = file.path.stat().st_size
        if file_size <= MOST_UNCUT:
            inputs.append(file)
            size += file_size
        if inputs and (size >= CHUNK_BYTES or file_size > MOST_UNCUT):
            yield Chunk(size, partial(_whole, inputs, skip))
            inputs, size = [], 0
        if file_size > MOST_UNCUT:
            yield from text_pieces(file)
    if inputs:
        yield Chunk(size, partial(_whole, inputs, skip))


def text_pieces(file: Input) -> Iterator[Chunk]:
    """A file, read in blocks and cut between paragraphs if possible, otherwise between lines.

    A byte that is not UTF-8 rejects its piece, but not the pieces after it.
    """
    stream, reported, number = ByteStream(file.path), 0, 0
    texts, size = list[str](), 0
    at = len(codecs.BOM_UTF8) * (ByteStream(file.path).head(3) == codecs.BOM_UTF8)  # bytes before the texts
    damage = None
    try:
        for text in cut_text(_decoded(stream)):
            texts.append(text)
            size += len(text)
            if size >= CHUNK_BYTES:
                yield Chunk(stream.consumed - reported, partial(_pieces, file, texts, number, at))
                number, reported, at = number + len(texts), stream.consumed, at + _size(texts)
                texts, size = [], 0
    except TruncatedError as error:
        damage = refusal(str(file.path), str(error))
    yield Chunk(stream.consumed - reported, partial(_pieces, file, texts, number, at))
    if damage:
        yield damage


def _whole(files: Sequence[Input], skip: bool) -> Records:
    """A document for each file; with `skip`, files that are not text are left out."""
    for file in files:
        try:
            text = b"".join(ByteStream(file.path)).decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            if not skip:
                yield _not_utf8(file, error.start, error.object[error.start])
        except TruncatedError as damage:
            yield Rejected(str(file.path), str(damage))
        else:
            yield from document(_location(file, text), file.name, text)


def _pieces(file: Input, texts: Sequence[str], first: int, position: int) -> Records:
    """A document for each piece, numbered from `first`, which begins at byte `position`."""
    for i, text in enumerate(texts):
        if not text.isascii() and (bad := _ESCAPED.search(text)):
            before = position + _size([*texts[:i], text[: bad.start()]])
            yield _not_utf8(file, before, ord(bad[0]) - 0xDC00)
        else:
            number = first + i
            yield from document(f"{file.path}, piece {number},", f"{file.name}#{number}", text)


def _decoded(stream: ByteStream) -> Iterator[str]:
    """The text in blocks; a byte that is not UTF-8 becomes U+DC00 + byte, unused in any text."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    for block in stream:
        yield decoder.decode(block)
    yield decoder.decode(b"", True)


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
        for line in lines:
            yield from _parts(line)
        # The last line may continue in the next block, if only with the \n of a \r\n: yield full parts only.
        full = (len(rest) - 1) // _PIECE_MOST * _PIECE_MOST if rest else 0
        yield from _parts(rest[:full])
        rest = rest[full:]
    yield from _parts(rest)


def _parts(line: str) -> Iterator[str]:
    for start in range(0, len(line), _PIECE_MOST):
        yield line[start : start + _PIECE_MOST]


def _location(file: Input, text: str) -> str:
    """The file, with the line of the first NUL if there is one."""
    nul = text.find("\x00")
    return str(file.path) if nul < 0 else f"{file.path}:{text.count(chr(10), 0, nul) + 1}"


def _not_utf8(file: Input, position: int, byte: int) -> Rejected:
    return Rejected(str(file.path), f"is not UTF-8: byte {position} is 0x{byte:02x}", _CONVERT)

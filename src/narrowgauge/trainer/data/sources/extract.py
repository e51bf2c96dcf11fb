"""WikiExtractor's files: `<doc id= url= title=>`, the title, the text, `</doc>`; each is a document."""

import re
from collections.abc import Iterator
from functools import partial

from narrowgauge.trainer.data.sources.byte_stream import ByteStream, chunks_of
from narrowgauge.trainer.data.sources.records import Chunk, Input, Records, Rejected, document

_END = b"</doc>"
_BEGIN = re.compile(rb'\s*<doc [^>\n]*?title="([^"\n]*)"[^>\n]*>\n?')


def chunks(file: Input) -> Iterator[Chunk]:
    """The file in portions of complete documents."""
    return chunks_of(ByteStream(file.path), _END, "begins a document", partial(_docs, str(file.path)))


def _docs(path: str, data: bytes, line: int) -> Records:
    """A document for each `<doc>`, named by its title; the first begins at or after the line `line`."""
    *parts, rest = data.split(_END)
    for part in parts:
        where, begin = f"{path}:{line}", _BEGIN.match(part)
        line += part.count(b"\n")
        if begin is None:
            yield Rejected(where, "is not followed by <doc ... title=...>")
            continue
        try:
            yield from document(where, begin[1].decode("utf-8"), part[begin.end() :].decode("utf-8"))
        except UnicodeDecodeError as error:
            yield Rejected(where, f"begins a document that is not UTF-8 ({error.reason})")
    if rest.strip():
        yield Rejected(f"{path}:{line}", "begins a document without </doc>")

"""WikiExtractor's files: `<doc id= url= title=>`, the title, the text, `</doc>`; each is a document."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from narrowgauge.data.sources.byte_stream import ByteStream, chunks_of
from narrowgauge.data.sources.records import Chunk, Document, Input, Rejected, document

_END = b"</doc>"
_BEGIN = re.compile(rb'\s*<doc [^>\n]*?title="([^"\n]*)"[^>\n]*>\n?')


@dataclass(frozen=True)
class Docs:
    """Complete documents of a file; the first begins at or after the line `first_line`."""

    path: str
    data: bytes
    first_line: int
    size: int

    def records(self) -> Iterator[Document | Rejected]:
        """A document for each `<doc>`, named by its title."""
        line = self.first_line
        *parts, rest = self.data.split(_END)
        for part in parts:
            where, begin = f"{self.path}:{line}", _BEGIN.match(part)
            line += part.count(b"\n")
            if begin is None:
                yield Rejected(where, "is not followed by <doc ... title=...>")
                continue
            try:
                yield from document(where, begin[1].decode("utf-8"), part[begin.end() :].decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Rejected(where, f"begins a document that is not UTF-8 ({error.reason})")
        if rest.strip():
            yield Rejected(f"{self.path}:{line}", "begins a document without </doc>")


def chunks(file: Input) -> Iterator[Chunk]:
    """The file in portions of complete documents."""
    return chunks_of(ByteStream(file.path), _END, "begins a document", partial(Docs, str(file.path)))

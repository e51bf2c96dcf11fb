"""Documents, and the chunks of a source that contain them.

One process reads a source, and many parse it. The reader cuts the files into *chunks* of about a megabyte
without parsing them. Each chunk is sent to a worker, where `records` makes documents and rejected records of
it. These depend on the chunk alone, so it does not matter which worker parses it, or when.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError

CHUNK_BYTES = 1 << 20  # sent to a worker at once
MOST_BYTES = 32 << 20  # in one record: a longer one is more likely a broken file than a text

SET_ASIDE = "fix it, or set such records aside with `narrowgauge prepare --tolerant`"
NAME_KEY = "name its key or column with `narrowgauge prepare --text-key`"


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


@dataclass(frozen=True)
class Input:
    """A file of a source: its name below the source, its path, and how it is read."""

    name: str
    path: Path
    type: str = "text"


Records = Iterator[Document | Rejected]


@dataclass(frozen=True)
class Chunk:
    """A portion of a source, sent to a worker."""

    size: int  # bytes of the source's files that it covers
    records: Callable[[], Records]  # its documents and rejected records in their order; can be pickled


def refusal(where: str, reason: str, remedy: str = SET_ASIDE, size: int = 0) -> Chunk:
    """A chunk of one rejected record, for input that the reader itself cannot read."""
    return Chunk(size, partial(iter, (Rejected(where, reason, remedy),)))


@dataclass(frozen=True)
class Source:
    """A source of text."""

    name: str  # as given by the user
    inputs: tuple[Input, ...]  # its files, in order
    chunks: Callable[[Sequence[Input]], Iterator[Chunk]]  # reads the inputs from the start
    identity: str = ""  # identifies the content if there are no files to digest


def package(name: str, what: str, extra: str = "data") -> Any:
    """A package that reads `what`, imported; a `UserError` names the extra that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(
            f"{what} needs the package {name.partition('.')[0]}; python -m pip install 'narrowgauge[{extra}]'"
        ) from None


def document(where: str, name: str, text: object) -> Records:
    """The document of a text, nothing for white space, or the rejected record with the reason."""
    if not isinstance(text, str):
        yield Rejected(where, f"has a {type(text).__name__} where a text belongs")
    elif "\x00" in text:
        yield Rejected(where, f"holds a NUL byte (character {text.index(chr(0))}), so it is not text")
    elif not text.isascii() and (half := _half_a_pair(text)):
        yield Rejected(where, f"holds half a surrogate pair ({half}), which UTF-8 cannot encode")
    elif text and not text.isspace():
        yield Document(name, text)


def _half_a_pair(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} at character {error.start}"
    return ""

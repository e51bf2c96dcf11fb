"""Files written, documents read, the sentence of a refusal: what tests of data share."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.sources.readers import no_text, open_source
from narrowgauge.trainer.data.sources.records import Rejected


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents(source, key="text"):
    """The documents of a source in order; an error for the first rejected record, as `prepare` raises it."""
    opened, empty = open_source(source, key), True
    for chunk in opened.chunks(opened.inputs):
        for record in chunk.records():
            if isinstance(record, Rejected):
                raise UserError(str(record))
            empty = False
            yield record
    if empty:
        raise no_text(source)


def pairs(source, key="text") -> list[tuple[str, str]]:
    """(name, text) of each document of a source."""
    return [(document.name, document.text) for document in documents(str(source), key)]


def names(source) -> list[str]:
    return [name for name, _ in pairs(source)]


def texts(source, key="text") -> list[str]:
    return [text for _, text in pairs(source, key)]


def refusal(source, key="text") -> str:
    """The sentence with which a source is refused."""
    with pytest.raises(UserError) as caught:
        list(documents(str(source), key))
    return str(caught.value)


@contextmanager
def full_disk(largest: int) -> Iterator[None]:
    """As if the disk ended there: no file may be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def documents_in(tokens, end: int) -> list[np.ndarray]:
    """The documents in a row of tokens, each begun by the id `end`."""
    starts = [*np.flatnonzero(tokens[:] == end), len(tokens)]
    assert starts[0] == 0
    return [np.asarray(tokens[a + 1 : b]) for a, b in pairwise(starts)]

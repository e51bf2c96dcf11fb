"""JSON lines: one object a line, its text under a key; C4, the Pile and most crawls use it.

Lines have no names, so a document of such a file is its text alone: it is on the same side of the split
wherever it occurs, in whichever file.
"""

import json
from collections.abc import Iterator
from functools import partial

from narrowgauge.trainer.data.sources.byte_stream import ByteStream, chunks_of
from narrowgauge.trainer.data.sources.records import (
    NAME_KEY,
    SET_ASIDE,
    Chunk,
    Input,
    Records,
    Rejected,
    document,
    refusal,
)


def chunks(file: Input, key: str) -> Iterator[Chunk]:
    """The file, compressed or not, in portions of complete lines."""
    if not file.path.stat().st_size:
        yield refusal(str(file.path), "is empty", "download it again, or leave it out")
        return
    yield from chunks_of(ByteStream(file.path), b"\n", "is a line", partial(_lines, str(file.path), key))


def _lines(path: str, key: str, data: bytes, first_line: int) -> Records:
    """A document for each line; lines of white space are skipped."""
    for number, line in enumerate(data.split(b"\n"), first_line):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line and not line.isspace():
            yield from _record(f"{path}:{number}", line, key)


def _record(where: str, line: bytes, key: str) -> Records:
    if (nul := line.find(b"\x00")) >= 0:
        yield Rejected(where, f"holds a NUL byte (byte {nul} of the line)")
        return
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        yield Rejected(where, f"is not UTF-8: byte {error.start} of the line is 0x{byte:02x}")
    except json.JSONDecodeError as error:
        yield Rejected(where, f"is not JSON: {error.msg} at character {error.pos} of {len(line)} bytes")
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        yield Rejected(where, "is not JSON that can be read: nested too deeply, or a number too long")
    else:
        if not isinstance(value, dict):
            yield Rejected(where, f"holds a {type(value).__name__} where an object belongs")
        elif key not in value:
            keys = ", ".join(list(value)[:8]) or "nothing"
            yield Rejected(where, f"has no {key!r}; it has {keys}"[:300], f"{NAME_KEY}, {SET_ASIDE}")
        else:
            yield from document(where, "", value[key])

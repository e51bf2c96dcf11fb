"""Texts under a key or in a column: JSON lines, parquet files, and data sets of the Hugging Face hub.

Lines and rows have no names, so such a document is its text alone: it is on the same side of the split
wherever it occurs, in whichever file.

`hf:NAME[:CONFIG[:SPLIT]]` is read by the hub's library `datasets`. It downloads a data set into its cache
(HF_HOME), resumes a download that was cut off, and reads the cache in offline mode (HF_HUB_OFFLINE=1). It
runs no code of a data set. If it fails for good, the error lists what was tried and how to manage without the
hub.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.request import getproxies

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.data.sources.records import (
    NAME_KEY,
    SET_ASIDE,
    ByteStream,
    Chunk,
    Input,
    Records,
    Rejected,
    Source,
    chunks_of,
    document,
    not_utf8,
    package,
    refusal,
)

HUB = "hf:"
_ROWS = 256  # rows read at once: a row of a crawl has some thousand characters
_SETTINGS = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # a mirror, offline mode


def line_chunks(file: Input, key: str) -> Iterator[Chunk]:
    """JSON lines, compressed or not, in portions of complete lines; C4, the Pile and most crawls use them."""
    if not file.path.stat().st_size:
        yield refusal(str(file.path), "is empty", "download it again, or leave it out")
        return
    yield from chunks_of(ByteStream(file.path), b"\n", "is a line", partial(_lines, str(file.path), key))


def _lines(path: str, key: str, first_line: int, data: bytes) -> Records:
    """A document for each line; lines of white space are skipped."""
    for number, line in enumerate(data.split(b"\n"), first_line):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line and not line.isspace():
            yield from _line(f"{path}:{number}", line, key)


def _line(where: str, line: bytes, key: str) -> Records:
    if (nul := line.find(b"\x00")) >= 0:
        yield Rejected(where, f"holds a NUL byte (byte {nul} of the line)")
        return
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        yield not_utf8(where, f"{error.start} of the line", line[error.start])
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


def parquet_chunks(file: Input, key: str) -> Iterator[Chunk]:
    """The rows of the column `key`, a few hundred at a time."""
    arrow, parquet = (package(name, "a .parquet file") for name in ("pyarrow", "pyarrow.parquet"))
    row, size = 0, file.path.stat().st_size
    try:
        with parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
            schema = table.schema_arrow
            _require_column(str(file.path), key, schema.names)
            is_dictionary = arrow.types.is_dictionary(held := schema.field(key).type)
            texts = held.value_type if is_dictionary else held
            if not re.match("(large_|fixed_size_)?(string|binary)", str(texts)):
                raise UserError(f"column {key!r} of {file.path} holds {held}, not text; {NAME_KEY}")
            row_bytes = size / max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(_ROWS, columns=[key], use_threads=False):
                values = batch.column(0).dictionary_decode() if is_dictionary else batch.column(0)
                # Read as bytes, so that a text that is not UTF-8 is rejected on its own.
                values = values.cast(arrow.large_binary())
                part = partial(_rows, str(file.path), values.to_pylist(), row)
                yield Chunk(round(row_bytes * len(values)), part)
                row += len(values)
    except (OSError, arrow.ArrowException) as error:
        yield refusal(f"{file.path}, row {row},", f"cannot be read as parquet ({error})")


def _rows(path: str, values: Sequence[Any], first_row: int) -> Records:
    """A document for each value of a column."""
    for row, value in enumerate(values, first_row):
        where = f"{path}, row {row},"
        yield from [Rejected(where, "has no text")] if value is None else document(where, "", value)


def _require_column(where: str, key: str, columns: Sequence[str]) -> None:
    if key not in columns:
        raise UserError(f"{where}: {unknown('column', key, columns)}; {NAME_KEY}")


def open_hub(source: str, key: str) -> Source:
    """The data set that `source` names, its text in the column `key`; a `UserError` if it names none."""
    name, _, rest = source.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise UserError(
            f"{source!r} does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        )

    def chunks(_: object) -> Iterator[Chunk]:
        table = _load(name, config or None, split or "train")
        _require_column(source, key, table.column_names)
        table = table.select_columns([key])
        for first in range(0, len(table), _ROWS):
            yield Chunk(0, partial(_rows, source, table[first : first + _ROWS][key], first))

    return Source(source, (), chunks, identity=source)


def _load(name: str, config: str | None, split: str) -> Any:
    datasets = package("datasets", f"data set {name!r}")
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # each of the libraries below has its exception types
        root: BaseException = error  # the library's error names what failed, its root cause why
        while cause := root.__cause__ or root.__context__:
            root = cause
        reasons = dict.fromkeys(f"{type(e).__name__}: {e}" for e in (error, root))
        reason = " ".join(" from ".join(reasons).split())[:400]
        settings = {"HTTPS_PROXY": getproxies().get("https")} | {
            name: os.environ.get(name) for name in _SETTINGS
        }
        tried = ", ".join(f"{key}={_without_password(value or '')}" for key, value in settings.items())
        raise UserError(
            f"data set {name!r} cannot be read ({reason}) with {tried}; fix these, or fetch its .parquet or "
            ".jsonl files on a machine that reaches them, copy the folder here and prepare the folder"
        ) from error


def _without_password(address: str) -> str:
    scheme, mark, rest = address.rpartition("://")
    return scheme + mark + rest.rpartition("@")[2]  # a password may contain any character but the last @

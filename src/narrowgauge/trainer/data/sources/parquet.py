"""Parquet files: a column of texts, the format of data sets on the Hugging Face hub."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.data.sources.records import (
    NAME_KEY,
    Chunk,
    Input,
    Records,
    Rejected,
    document,
    package,
    refusal,
)

ROWS = 256  # rows read at once: a row of a crawl has some thousand characters


def rows(path: str, values: Sequence[Any], first_row: int) -> Records:
    """A document for each value of a column; bytes are UTF-8, texts of white space are skipped."""
    for number, value in enumerate(values, first_row):
        where = f"{path}, row {number},"
        try:
            text = value.decode("utf-8") if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            yield Rejected(where, f"is not UTF-8: byte {error.start} is 0x{value[error.start]:02x}")
            continue
        if value is None:
            yield Rejected(where, "has no text")
        else:
            yield from document(where, "", text)


def chunks(file: Input, key: str) -> Iterator[Chunk]:
    """The rows of the column `key`, a few hundred at a time."""
    arrow, parquet = (package(name, "a .parquet file") for name in ("pyarrow", "pyarrow.parquet"))
    row, size = 0, file.path.stat().st_size
    try:
        with parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
            _require_text(arrow, file, key, table.schema_arrow)
            row_bytes = size / max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(ROWS, columns=[key], use_threads=False):
                values = batch.column(0)
                if arrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                # Read as bytes, so that a text that is not UTF-8 is rejected on its own.
                values = values.cast(arrow.large_binary())
                part = partial(rows, str(file.path), values.to_pylist(), row)
                yield Chunk(round(row_bytes * len(values)), part)
                row += len(values)
    except (OSError, arrow.ArrowException) as error:
        yield refusal(f"{file.path}, row {row},", f"cannot be read as parquet ({error})")


def _require_text(arrow: Any, file: Input, key: str, schema: Any) -> None:
    if key not in schema.names:
        raise UserError(f"{file.path}: {unknown('column', key, schema.names)}; {NAME_KEY}")
    held = schema.field(key).type
    type_ = held.value_type if arrow.types.is_dictionary(held) else held
    if not re.match("(large_|fixed_size_)?(string|binary)", str(type_)):
        raise UserError(f"column {key!r} of {file.path} holds {held}, not text; {NAME_KEY}")

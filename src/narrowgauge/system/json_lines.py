"""JSON-lines files: a run appends to them and may be killed at any moment; reading them back."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from errno import ENOSPC
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError


def strict_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for strict JSON: non-finite numbers become None.

    >>> strict_json({"loss": float("nan"), "step": 3})
    {'loss': None, 'step': 3}
    """
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON objects as lines of a JSON-lines file.

    They are written with one `write`, so a kill leaves at most one torn line, at the end; the next append
    cuts it off first. If the disk is full, the file ends with its last complete line. NaN and infinity are
    written as `NaN` and `Infinity`, so that a loss that went wrong stays visible. Not synced: a power cut may
    lose the last lines.
    """
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        end = _end_of_last_line(descriptor)
        if end < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, end)
        if os.write(descriptor, lines) < len(lines):
            os.ftruncate(descriptor, end)
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _end_of_last_line(descriptor: int, block: int = 1 << 16) -> int:
    """Offset just after the last newline, searched from the end; 0 if there is none."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, ignoring a torn last line (one without its newline)."""
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged_line(path, number, str(error)) from error
        if not isinstance(record, dict):
            raise _damaged_line(path, number, f"a {type(record).__name__}")
        records.append(record)
    return records


def _damaged_line(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"{path}:{number}: every line must be one JSON object, and this one is not ({reason}); "
        f"only a last line can be torn by a kill, so the file was changed or the disk is failing: "
        f"fix or delete that line"
    )


def bytes_until_step(path: Path, step: int) -> int:
    """Bytes before the first line of a step after `step`, or before a torn line; steps ascend."""
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                raise _damaged_line(path, number, "it has no step") from None
            size += len(line)
    return size

"""The files of a run directory as they are: settings, status, the lines of metrics.jsonl and gauges.jsonl.

`kill -9` can tear the line that is being written, and a resumed run repeats the steps after its last
checkpoint. So a line that is not a whole JSON object is left out (and counted), and where a step was
recorded more than once the last record wins.
"""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError

_TAIL = 2**24  # bytes at the end of gauges.jsonl that hold more than the lines of a step


def read_config(path: Path) -> dict[str, Any]:
    """The settings; none where the file is missing. Raises `UserError` where it is no TOML."""
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{str(path)!r} is not valid TOML ({error}); mend that place and try again"
        ) from error


def read_status(path: Path) -> tuple[str, str]:
    """Status and reason; "unknown" where the file is missing or torn, for the run itself may be sound."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return "unknown", ""
    if not isinstance(found, dict):
        return "unknown", ""
    return str(found.get("status") or "unknown"), str(found.get("reason") or "")


def read_metrics(path: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]], int]:
    """Records by step (later ones override, key by key), events in order, number of unreadable lines."""
    records: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    ignored = 0
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in filter(bytes.strip, lines):
        record = _parse(line)
        if record is None:
            ignored += 1
        elif "event" in record:
            events.append(record)
        else:
            records.setdefault(record["step"], {}).update(record)
    return dict(sorted(records.items())), events, ignored


def read_gauges(path: Path) -> list[dict[str, Any]]:
    """The lines of the last step that was read; what is torn, or says no layer and place, is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().splitlines()
    parsed = [record for line in lines if (record := _parse(line)) is not None]
    told = [
        line for line in parsed if isinstance(line.get("layer"), str) and isinstance(line.get("place"), str)
    ]
    return [line for line in told if line["step"] == told[-1]["step"]]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line as a record that has an integer step or an event name; None where it is not one."""
    try:
        record = json.loads(line)
    except ValueError:  # torn, or not UTF-8
        return None
    if not isinstance(record, dict):
        return None
    if "event" in record:
        record["event"] = str(record["event"])
        record["step"] = record["step"] if isinstance(record.get("step"), int) else 0
        return record
    return record if isinstance(record.get("step"), int) else None


def as_float(value: object) -> float:
    """A JSON value as a float; NaN for null, for words and for what is missing."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan

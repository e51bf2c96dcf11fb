"""The files of a run directory as they are: settings, status, the lines of metrics.jsonl and gauges.jsonl.

`kill -9` can tear the line that is being written, and a resumed run repeats the steps after its last
checkpoint. So a line that is not a whole JSON object is left out (and counted), and where a step was
recorded more than once the last record wins.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError

MOST_READINGS = 20_000  # lines of gauges.jsonl that are kept: more than a page shows
_STEP = re.compile(rb'\{"step": (\d+),')  # how a line of ours begins


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
    """The lines of the steps that were read; of very many, of some evenly spaced, among them the last.

    What is torn, or says no layer and place, is left out. The file is read twice and never held whole.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines_of: dict[int, int] = {}
        for line in file:
            if (step := _step_of(line)) is not None:
                lines_of[step] = lines_of.get(step, 0) + 1
        chosen = set(_some_steps(lines_of))
        file.seek(0)
        parsed = [_parse(line) for line in file if _step_of(line) in chosen]
    return [
        line
        for line in parsed
        if line is not None and isinstance(line.get("layer"), str) and isinstance(line.get("place"), str)
    ]


def _step_of(line: bytes) -> int | None:
    """The step of a line that is whole; most are found without reading them."""
    if (found := _STEP.match(line)) and line.endswith(b"}\n"):
        return int(found[1])
    record = _parse(line)
    return None if record is None else int(record["step"])


def _some_steps(lines_of: Mapping[int, int]) -> list[int]:
    """The steps whose lines are kept: every n-th, counted from the last."""
    steps = sorted(lines_of)
    every = math.ceil(sum(lines_of.values()) / MOST_READINGS) or 1
    return steps[::-1][::every][::-1]


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

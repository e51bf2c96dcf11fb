"""Readers of the files of a run directory, and the steps and validations in them.

`kill -9` can tear the line being written, and a resumed run repeats the steps after its last checkpoint. So a
line that is not a complete JSON object is skipped (and counted), and of several records of a step the last
one counts.

A missing or non-finite value becomes NaN, never zero: a loss that overflowed must stay visible in every mean
that includes it.
"""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.guard.guard import spike_ratio
from narrowgauge.system.errors import UserError

MOST_READINGS = 20_000  # lines of gauges.jsonl to keep; a page shows fewer
MOST_TEXT = 16_000  # characters of a recipe that a page shows
_STEP = re.compile(rb'"step":\s*(\d+)')  # found without parsing the line


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a config.toml; empty if the file is missing."""
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} is not valid TOML ({error}); fix that place and try again") from error


def read_text(path: Path) -> str:
    """The text of a file, cut if it is long; "" if it is missing or not text."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n# and so on: {path.name}\n"


def read_metrics(path: Path, tail: int = 0) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]], int]:
    """Records by step (later ones override, key by key), events in order, number of unreadable lines.

    Of a file with more than `tail` bytes only so many at its end are read; 0 for all.
    """
    records: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    ignored, lines = 0, []
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - tail) if tail else 0)
            lines = file.read().splitlines()
    for line in filter(bytes.strip, lines):
        record = parse_line(line)
        if record is None:
            ignored += 1
        elif "event" in record:
            events.append(record)
        else:
            records.setdefault(record["step"], {}).update(record)
    return dict(sorted(records.items())), events, ignored


def read_gauges(path: Path) -> list[dict[str, Any]]:
    """The lines of gauges.jsonl; for a very long file only evenly spaced steps, including the last.

    Torn lines and lines without layer or place are left out. The file is read twice and never held
    completely.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines_of = Counter(int(match[1]) for line in file if (match := _STEP.search(line)))
        stride = math.ceil(lines_of.total() / MOST_READINGS) or 1
        kept = set(sorted(lines_of)[::-1][::stride])
        file.seek(0)
        wanted = (line for line in file if (match := _STEP.search(line)) and int(match[1]) in kept)
        found = [line for line in map(parse_line, wanted) if line is not None]
    return [line for line in found if all(isinstance(line.get(key), str) for key in ("layer", "place"))]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The line as a record with an integer step or an event name; None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # torn, or not UTF-8
        return None
    if not isinstance(record, dict):
        return None
    if "event" in record:
        record["event"] = str(record["event"])
        record["step"] = record["step"] if isinstance(record.get("step"), int) else 0
        return record
    return record if isinstance(record.get("step"), int) else None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as {"section.key": value}, in order."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def as_float(value: object) -> float:
    """A JSON value as a float; NaN for null, text and missing values."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


class Step(NamedTuple):
    """One optimizer step. Unrecorded floats are NaN."""

    step: int
    tokens: int  # cumulative
    seconds: float  # cumulative time spent in steps, without pauses between restarts
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float
    memory_bytes: float
    step_ms: float = math.nan


class Validation(NamedTuple):
    """One pass over the held-out tokens after `tokens` of training."""

    step: int
    tokens: int
    val_loss: float
    held_out: int = 0  # the number of held-out tokens; 0 if unrecorded
    parts: tuple[float, ...] = ()  # the losses of equal parts of them; () if unrecorded


def steps_and_validations(records: Mapping[int, Mapping[str, Any]]) -> tuple[list[Step], list[Validation]]:
    """The training steps and the validation losses of records in order.

    A line that covers several steps applies its `step_ms` to each of them. A record without tokens takes the
    preceding step's.
    """
    steps: list[Step] = []
    found: list[Validation] = []
    seconds, previous, tokens = 0.0, 0, 0
    for number, record in records.items():
        here = as_float(record.get("tokens"))
        here = int(here) if math.isfinite(here) else tokens
        if "loss" in record:
            figures = [as_float(record.get(name)) for name in Step._fields[3:]]
            milliseconds = figures[-1]
            seconds += (number - previous) * milliseconds / 1000 if math.isfinite(milliseconds) else 0.0
            previous, tokens = number, here
            steps.append(Step(number, tokens, seconds, *figures))
        if "val_loss" in record:
            held_out, parts = as_float(record.get("val_tokens")), record.get("val_parts")
            count = int(held_out) if math.isfinite(held_out) else 0
            losses = tuple(map(as_float, parts)) if isinstance(parts, list) else ()
            found.append(Validation(number, here, as_float(record["val_loss"]), count, losses))
    return steps, found


def finite(steps: Sequence[Step], name: str) -> list[float]:
    """The finite values of a figure."""
    return [value for step in steps if math.isfinite(value := getattr(step, name))]


def warmup_spikes(steps: Sequence[Step]) -> list[float]:
    """The spikes among the gradient norms of a run while its learning rate rises (`spike_ratio`), each as a
    multiple of the median before it.
    """
    peak = max((step.lr for step in steps if math.isfinite(step.lr)), default=math.inf)
    norms: list[float] = []
    found = []
    for step in steps:
        if not math.isfinite(step.grad_norm) or not step.grad_norm:
            break
        found.append(spike_ratio(norms, step.grad_norm))
        norms.append(step.grad_norm)
        if step.lr >= peak:
            break
    return [ratio for ratio in found if ratio]

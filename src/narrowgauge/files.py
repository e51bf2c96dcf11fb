"""Files that survive a kill and a power cut.

Three facts about file systems decide everything here:

1. `write` fills memory. Only `fsync(file)` puts the bytes on the disk.
2. `rename` is atomic: a reader sees the old name or the new one, never half of each. But the name itself
   lives in the directory, so only `fsync(directory)` makes the rename last.
3. A process can die between any two of these calls.

So a file is written whole under a temporary name, synced, renamed, and the directory is synced: in this
order, whoever looks finds the old content or the new one.

Tests stop the process at any of these moments: with `NARROWGAUGE_CRASH_AT=<point>` in the environment the
process ends there at once with exit code 137, as after `kill -9`; `<point>@<rank>` is for one of several
processes. The points of `write_whole`, where NAME is
the file's name, are `write:NAME`, `synced:NAME`, `renamed:NAME`; those of a checkpoint are listed in
`narrowgauge.checkpoint.store.commit`.
"""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from errno import ELOOP, ENOSPC
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch.distributed as dist

from narrowgauge.errors import UserError

CRASH_AT = "NARROWGAUGE_CRASH_AT"


def crash_point(name: str) -> None:
    """End the process here, without any clean-up, if the environment asks for it."""
    asked = os.environ.get(CRASH_AT)
    if asked and (asked == name or asked == f"{name}@{_rank()}"):
        os._exit(137)


def _rank() -> int:
    """Of this process among those that train together."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def write_whole(path: Path, data: bytes | str) -> None:
    """Replace the content of `path` so that it is the old one or the new one after any crash.

    Text is stored as UTF-8. Raises `OSError` (disk full, no permission); `path` is then as it was.
    """
    draft = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_new(draft, data, name=path.name)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    crash_point(f"renamed:{path.name}")
    fsync_directory(path.parent)


def write_new(path: Path, data: bytes | str, name: str | None = None) -> None:
    """Write and sync a file that must not exist yet; `name` is what its crash points are called."""
    name = name or path.name
    crash_point(f"write:{name}")
    with path.open("xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    crash_point(f"synced:{name}")


def fsync_directory(path: Path) -> None:
    """Make the names in a directory last: files created in it, renamed into it, removed from it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """`mkdir -p` whose new names last."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, and nothing but a file: no symbolic link, no pipe, no device.

    Raises `OSError` with the reason.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )  # a pipe would wait for a writer
    except OSError as error:
        if error.errno == ELOOP:
            raise OSError(ELOOP, "is a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file", str(path))
    return open(descriptor, "rb")


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file's bytes, 64 lower-case hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object as one line of a JSON-lines file; see `append_lines`."""
    append_lines(path, [record])


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON objects as lines of a JSON-lines file.

    They are one `write`, so a kill leaves at most one torn line, at the end; the next append cuts it off
    before it writes. A NaN or an infinity is written as `NaN`, `Infinity`: a loss that went wrong has to
    stay visible. Not synced: a power cut may cost the last lines.

    Raises `OSError`; the file then ends with its last whole line.
    """
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        end = _end_of_whole_lines(descriptor)
        if end < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, end)
        if os.write(descriptor, lines) < len(lines):
            os.ftruncate(descriptor, end)
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _end_of_whole_lines(descriptor: int, block: int = 1 << 16) -> int:
    """Offset just after the last newline, searched from the end; 0 where there is none."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a torn last line (one that lacks its newline).

    Raises `UserError` with file and line where any other line is not a JSON object, and `OSError` where
    the file cannot be read.
    """
    *whole, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged_line(path, number, str(error)) from error
        if not isinstance(record, dict):
            raise _damaged_line(path, number, f"a {type(record).__name__}")
        records.append(record)
    return records


def _damaged_line(path: Path, number: int, what: str) -> UserError:
    return UserError(
        f"{path}:{number}: every line must be one JSON object, and this one is not ({what}); "
        f"only a last line can be torn by a kill, so the file was changed or the disk is failing: "
        f"mend or delete that line"
    )

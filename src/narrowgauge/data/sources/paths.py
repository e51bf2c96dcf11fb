"""Which files does a source name? Their order is the same on every machine."""

import glob
import os
import re
import sysconfig
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from narrowgauge.data.sources.byte_stream import COMPRESSED
from narrowgauge.data.sources.records import Input
from narrowgauge.errors import UserError, unknown

STDLIB = "stdlib"
TEXT, LINES, TABLE, DUMP = "text", "lines", "table", "dump"
_KINDS = {".txt": TEXT, ".md": TEXT, ".py": TEXT, ".jsonl": LINES, ".ndjson": LINES, ".xml": DUMP}
READABLE = ".txt, .md, .py, .jsonl, .parquet or .xml, or in .gz, .bz2 or .zst after these"

# Not the library itself, or not in every build of it: Debian ships some of these in separate packages.
_STDLIB_WITHOUT = frozenset(
    [
        *("test", "tests", "idle_test", "turtledemo", "site-packages", "dist-packages", "__pycache__"),
        *("idlelib", "tkinter", "lib2to3", "distutils", "ensurepip", "venv", "macholib"),
    ]
)
_STDLIB_WITHOUT_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py|_distutils_system_mod\.py|config-.*")


def file_type(path: Path) -> str | None:
    """How the file is read, by the end of its name; None for a file that is not read."""
    if path.suffix == ".parquet":
        return TABLE
    if path.suffix in COMPRESSED:
        inner = Path(path.stem).suffix
        return LINES if inner == ".json" else _KINDS.get(inner)  # C4 calls its lines .json.gz
    return _KINDS.get(path.suffix)


def standard_library() -> tuple[Input, ...]:
    """The modules of the running Python's standard library that every build of it has."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(
        file
        for file in _sorted(root, root.rglob("*.py"))
        if not _STDLIB_WITHOUT.intersection(parts := file.name.split("/"))
        and not any(map(_STDLIB_WITHOUT_FILES.fullmatch, parts))
    )


def find_files(source: str) -> tuple[Input, ...]:
    """The files of a path, a directory or a glob, sorted by name; at least one, each of a type that is read.

    Raises:
        UserError: the source does not exist or leads to no such file.
    """
    path = Path(os.path.expanduser(source))  # unchanged if there is no such user
    if path.is_file():
        if file_type(path) is None:
            raise UserError(f"cannot read {source!r}: a source ends in {READABLE}; rename or convert it")
        return (Input(path.name, path),)
    if path.is_dir():
        root, paths = path, path.rglob("*")
    elif path.exists():
        raise UserError(f"data source {source!r} is neither a file nor a directory; give one that is")
    elif glob.has_magic(source):
        root = _fixed_part(path)
        paths = (Path(match) for match in glob.iglob(str(path), recursive=True))
    else:
        raise _missing(source, path)
    files = tuple(file for file in _sorted(root, paths) if _is_wanted(file))
    if not files:
        raise UserError(
            f"data source {source!r} leads to no file that can be read: such a file ends in {READABLE}"
        )
    return files


def _sorted(root: Path, paths: Iterable[Path]) -> list[Input]:
    named = (Input(path.relative_to(root).as_posix(), path) for path in paths)
    return sorted(named, key=lambda file: file.name)


def _is_wanted(file: Input) -> bool:
    hidden = any(part.startswith(".") for part in file.name.split("/"))
    return not hidden and file_type(file.path) is not None and file.path.is_file()


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first wildcard of a glob."""
    folder = pattern
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def _missing(source: str, path: Path) -> UserError:
    """The error for a path that does not exist, with the nearest one that does."""
    absent = path
    while not absent.parent.is_dir():
        absent = absent.parent
    siblings = [entry.name for entry in absent.parent.iterdir()]
    nearest = get_close_matches(absent.name, siblings, n=1)
    allowed = f"hf:NAME, a directory, a glob, or a file ending in {READABLE}"
    if nearest:
        near = absent.parent / nearest[0]
        return UserError(f"data source {source!r} does not exist; the nearest path is {str(near)!r}")
    if absent == path and len(path.parts) == 1 and not path.suffix:
        return UserError(f"{unknown('data source', source, [STDLIB])}; a source is {STDLIB!r}, {allowed}")
    return UserError(
        f"data source {source!r} does not exist: there is no {str(absent)!r}; a source is {allowed}"
    )

"""Finds the files of a source, in the same order on every machine."""

import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from narrowgauge.data.sources.byte_stream import COMPRESSED
from narrowgauge.data.sources.records import Input
from narrowgauge.errors import UserError, unknown

STDLIB = "stdlib"
TEXT, LINES, TABLE, DUMP = "text", "lines", "table", "dump"
_KINDS = {".txt": TEXT, ".md": TEXT, ".py": TEXT, ".jsonl": LINES, ".ndjson": LINES, ".xml": DUMP}
READABLE = ".txt, .md, .py, .jsonl, .parquet or .xml, or in .gz, .bz2 or .zst after these"

# Not the library itself, or not in every build: Debian ships some of these in separate packages.
_STDLIB_WITHOUT = frozenset(
    [
        *("test", "tests", "idle_test", "turtledemo", "site-packages", "dist-packages", "__pycache__"),
        *("idlelib", "tkinter", "lib2to3", "distutils", "ensurepip", "venv", "macholib"),
    ]
)
_STDLIB_WITHOUT_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py|_distutils_system_mod\.py|config-.*")


def file_type(path: Path) -> str | None:
    """The type of a file by its suffix; None if files of that type are not read."""
    suffix = path.suffix.lower()  # some systems write BOOK.TXT
    if suffix == ".parquet":
        return TABLE
    if suffix in COMPRESSED:
        inner = Path(path.stem).suffix.lower()
        return LINES if inner == ".json" else _KINDS.get(inner)  # C4 calls its lines .json.gz
    return _KINDS.get(suffix)


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
    """The files of a path, a directory or a glob, sorted by name; at least one, each of a readable type.

    Raises:
        UserError: the source does not exist, matches no such file, or leads to a broken link.
        OSError: a folder cannot be read.
    """
    path = Path(os.path.expanduser(source))  # unchanged if there is no such user
    if path.is_file():
        if file_type(path) is None:
            raise UserError(f"cannot read {source!r}: a source ends in {READABLE}; rename or convert it")
        return (Input(path.name, path),)
    if path.is_dir():
        if (path / "config.toml").is_file() and (path / "metrics.jsonl").is_file():
            raise UserError(
                f"data source {source!r} is a run directory, which holds no text; name the data that "
                "data.source in its config.toml names"
            )
        root, paths = path, _below(path)
    elif path.exists():
        raise UserError(f"data source {source!r} is neither a file nor a directory; give one that is")
    elif glob.has_magic(source):
        root = _fixed_part(path)
        # Two `**` can match a file in several ways.
        paths = map(Path, set(glob.iglob(str(path), recursive=True)))
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


def _below(root: Path) -> Iterator[Path]:
    """The files below a folder, except in hidden folders.

    A link to a folder is followed, unless that folder is read anyway. So no file is read twice, and a link
    to a parent folder ends the walk.
    """
    folders, seen = [root], set[str]()
    while folders:
        links = list[Path]()
        for folder, names, files in os.walk(folders.pop(0), onerror=_raise):
            if (real := os.path.realpath(folder)) in seen:
                names.clear()
                continue
            seen.add(real)
            names[:] = [name for name in names if not name.startswith(".")]
            links += [link for name in names if (link := Path(folder, name)).is_symlink()]
            yield from (Path(folder, name) for name in files)
        folders += sorted(links)


def _raise(error: OSError) -> None:
    raise error


def _is_wanted(file: Input) -> bool:
    if file_type(file.path) is None or any(part.startswith(".") for part in file.name.split("/")):
        return False
    if file.path.is_symlink() and not file.path.exists():
        raise UserError(f"{file.path} is a link that leads nowhere; fix it, or remove it")
    return file.path.is_file()


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

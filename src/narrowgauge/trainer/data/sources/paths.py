"""Finds the files of a source, in the same order on every machine."""

import glob
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import user_path
from narrowgauge.trainer.data.sources.records import COMPRESSED, ByteStream, Input

STDLIB = "stdlib"
TEXT, LINES, TABLE, DUMP, EXTRACT = "text", "lines", "table", "dump", "extract"
_KINDS = {".txt": TEXT, ".md": TEXT, ".py": TEXT, ".jsonl": LINES, ".ndjson": LINES, ".json": LINES}
_KINDS |= {".xml": DUMP, ".parquet": TABLE}
READABLE = ".txt, .md, .py, .jsonl, .json, .parquet or .xml, or in .gz, .bz2, .xz or .zst after these"
# Of a data set, and not in it: beside lines, tables and dumps; and by these names also beside .txt files.
_BESIDE = (".md", ".py")
_CARD = re.compile(r"(readme|licen[cs]e)([-_.]\w+)*", re.IGNORECASE)
_HEAD = 1 << 16  # bytes that decide what a file holds whose name does not

# Not the library itself, or not in every build: Debian ships some of these in separate packages.
_STDLIB_WITHOUT = frozenset(
    [
        *("test", "tests", "idle_test", "turtledemo", "site-packages", "dist-packages", "__pycache__"),
        *("idlelib", "tkinter", "lib2to3", "distutils", "ensurepip", "venv", "macholib"),
    ]
)
_STDLIB_WITHOUT_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py|_distutils_system_mod\.py|config-.*")


def file_type(path: Path) -> str | None:
    """The type of a file by its suffix, perhaps under one of a compression; None if it is not read."""
    suffix = path.suffix.lower()  # some systems write BOOK.TXT
    if suffix not in COMPRESSED:
        return _KINDS.get(suffix)
    type_ = _KINDS.get(Path(path.stem).suffix.lower())
    return None if type_ == TABLE else type_


def _type_by_content(path: Path, text_key: str) -> str | None:
    """The type of a file with the suffix .json or none: lines, one of WikiExtractor's, or None.

    A first line that is an object with the text's key tells a data set from the settings of a program.
    """
    head = ByteStream(path).head(_HEAD)
    if head.startswith(b"<doc "):
        return EXTRACT
    line, end, _ = head.partition(b"\n")
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        return LINES if isinstance(value, dict) and text_key in value else None
    return LINES if not end and line.startswith(b'{"') else None  # a line longer than the head


def standard_library() -> tuple[Input, ...]:
    """The modules of the running Python's standard library that every build of it has."""
    root, found = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_WITHOUT]
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    files = visible_files(root, found)
    return tuple(one for one in files if not any(map(_STDLIB_WITHOUT_FILES.fullmatch, one.name.split("/"))))


def find_files(source: str, text_key: str) -> tuple[Input, ...]:
    """The files of a path, a directory or a glob, sorted by name; at least one, each of a readable type.

    A warning names the files of a directory or glob that are left out.

    Raises:
        OSError: a folder cannot be read.
    """
    path = user_path(source)
    if path.is_file():
        type_ = file_type(path) or _type_by_content(path, text_key)
        if type_ is None:
            raise UserError(
                f"cannot read {source!r} as text or as tokens: text ends in {READABLE}, and tokens are "
                "uint16 ids or one row of integers in a .npy; rename or convert it"
            )
        return (Input(path.name, path, type_),)
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
        root = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
        # Two `**` can match a file in several ways.
        paths = map(Path, set(glob.iglob(str(path), recursive=True)))
    else:
        raise _missing(source, path)
    found = visible_files(root, paths)
    files = _of_data(found, text_key)
    if not files:
        raise UserError(
            f"data source {source!r} leads to no file that can be read: such a file ends in {READABLE}"
        )
    warn_of_the_rest(source, [file.path for file in found], [file.path for file in files])
    return tuple(files)


def _of_data(found: list[Input], text_key: str) -> list[Input]:
    """The files that hold documents, with their types; cards, licences and scripts beside data do not."""

    def type_of(path: Path) -> str | None:
        suffix = path.suffix.lower()
        inner = Path(path.stem).suffix if suffix in COMPRESSED else suffix
        return _type_by_content(path, text_key) if suffix == ".json" or not inner else file_type(path)

    typed = [replace(file, type=type_) for file in found if (type_ := type_of(file.path))]
    if not typed:  # perhaps lines with another key, whose reader lists the keys
        return [replace(file, type=LINES) for file in found if file_type(file.path) == LINES]
    has_records = any(file.type != TEXT for file in typed)
    has_data = has_records or any(file.path.suffix.lower() not in _BESIDE for file in typed)

    def is_beside(path: Path) -> bool:
        is_card = has_data and _CARD.fullmatch(path.name)
        return bool(is_card) or (has_records and path.suffix.lower() in _BESIDE)

    return [file for file in typed if not is_beside(file.path)] or typed


def warn_of_the_rest(source: str, found: list[Path], files: list[Path]) -> None:
    """Warn of the files that were found in a source and are not among those that are read."""
    sizes = {path: path.stat().st_size for path in found}
    rest = sorted(sizes.keys() - {*files}, key=lambda path: (-sizes[path], path))
    if rest:
        share = sum(map(sizes.__getitem__, rest)) / max(sum(sizes.values()), 1)
        warnings.warn(
            f"data source {source!r} leaves out {len(rest)} of {len(found)} files ({share:.0%} of the "
            "bytes), which hold nothing to train on or are of a type that is not read: "
            f"{', '.join(path.name for path in rest[:4])}{' ...' * (len(rest) > 4)}; convert what is data",
            stacklevel=2,
        )


def visible_files(root: Path, paths: Iterable[Path] | None = None) -> list[Input]:
    """The files in order, without hidden ones; None: those below the root."""
    named = ((path.relative_to(root).as_posix(), path) for path in paths or _below(root))
    seen = [(name, path) for name, path in sorted(named) if not re.search(r"(^|/)\.", name)]
    for _, path in seen:
        if path.is_symlink() and not path.exists() and file_type(path) is not None:
            raise UserError(f"{path} is a link that leads nowhere; fix it, or remove it")
    return [Input(name, path) for name, path in seen if path.is_file()]


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


def _missing(source: str, path: Path) -> UserError:
    """The error for a path that does not exist, with the nearest one that does."""
    absent = path
    while not absent.parent.is_dir():
        absent = absent.parent
    nearest = get_close_matches(absent.name, [entry.name for entry in absent.parent.iterdir()], n=1)
    if nearest:
        near = absent.parent / nearest[0]
        return UserError(f"data source {source!r} does not exist; the nearest path is {str(near)!r}")
    is_word = absent == path and len(path.parts) == 1 and not path.suffix
    there_is_none = f"data source {source!r} does not exist: there is no {str(absent)!r}"
    return UserError(
        f"{unknown('data source', source, [STDLIB]) if is_word else there_is_none}; a source is {STDLIB!r}, "
        f"hf:NAME, a directory, a glob, or a file ending in {READABLE}"
    )

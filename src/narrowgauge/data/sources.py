"""Where does the text come from?

A *source* is one word or one path. It becomes a sequence of documents, in an order that depends on nothing
but the source itself: not on the file system, the locale or the day.

| source         | its documents                                                                       |
|----------------|-------------------------------------------------------------------------------------|
| `stdlib`       | each module of the running Python's standard library: ten megabytes that every      |
|                | machine already has                                                                 |
| a directory    | each text file below it; hidden files and folders are left out                      |
| a glob         | each text file that it matches; `**` goes through folders                           |
| a single file  | the file cut into pieces of whole paragraphs, about 4 to 16 thousand characters     |

A text file ends in .txt, .md or .py and is UTF-8; a byte order mark at its start is dropped, everything else
is kept to the letter, line endings included. Documents of nothing but white space are left out.

A single file is cut because a tenth of every corpus is held out *by document*, and a novel in one file
would otherwise be one document. The same holds where a directory or a glob leads to one file only. The
pieces put end to end are the file again.
"""

import glob
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from narrowgauge.errors import UserError, unknown

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")

# Not the library itself, or not in every build of it: Debian ships some of these in packages of their own.
_STDLIB_WITHOUT = frozenset(
    [
        *("test", "tests", "idle_test", "turtledemo", "site-packages", "dist-packages", "__pycache__"),
        *("idlelib", "tkinter", "lib2to3", "distutils", "ensurepip", "venv", "macholib"),
    ]
)
_STDLIB_WITHOUT_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py|_distutils_system_mod\.py|config-.*")

_PIECE_ENOUGH = 4096  # from here on a blank line ends the piece,
_PIECE_LONG = 12288  # from here on any line does,
_PIECE_MOST = 16384  # and no line is longer than this


@dataclass(frozen=True)
class Document:
    """One text that is trained on, or held out, as a whole; `name` is its path below the source."""

    name: str
    text: str


def documents(source: str) -> Iterator[Document]:
    """The documents of `source` in their fixed order.

    Errors: `UserError` for a source that does not exist or holds no text file (at once), and for a file that
    is not UTF-8 or a corpus without text (when iteration comes to it).
    """
    if source == STDLIB:
        return _standard_library()
    try:
        files = _text_files(source)
    except OSError as error:
        raise UserError(
            f"cannot look into {source!r}: {error.strerror}; give a source that can be read"
        ) from None
    pieces = _cut(*files[0]) if len(files) == 1 else (Document(name, _read(path)) for name, path in files)
    return _with_text(source, pieces)


def _with_text(source: str, candidates: Iterator[Document]) -> Iterator[Document]:
    empty = True
    for document in candidates:
        if document.text.strip():
            empty = False
            yield document
    if empty:
        raise UserError(f"data source {source!r} holds nothing but white space; give one with text in it")


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _sorted(root, root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _STDLIB_WITHOUT.intersection(parts) or any(map(_STDLIB_WITHOUT_FILES.fullmatch, parts)):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a test fixture in some build: the same file is left out every time
            continue
        if text.strip():
            yield Document("/".join(parts), text)


def _sorted(root: Path, paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _text_files(source: str) -> list[tuple[str, Path]]:
    """(name below the source, path) of each text file, sorted by name; at least one."""
    path = Path(source).expanduser()
    kinds = ", ".join(TEXT_SUFFIXES)
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise UserError(
                f"cannot read {source!r} as text: a text file ends in {kinds}; rename or convert it"
            )
        return [(path.name, path)]
    if path.is_dir():
        root, found = path, path.rglob("*")
    elif path.exists():
        raise UserError(f"data source {source!r} is neither a file nor a directory; give one that is")
    elif glob.has_magic(source):
        root = _fixed_part(path)
        found = (Path(match) for match in glob.iglob(str(path), recursive=True))
    else:
        raise _missing(source, path)
    files = [(p.relative_to(root).as_posix(), p) for p in _sorted(root, found) if _is_text_file(root, p)]
    if not files:
        raise UserError(f"data source {source!r} leads to no text file: a text file ends in {kinds}")
    return files


def _is_text_file(root: Path, path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.suffix in TEXT_SUFFIXES and not hidden and path.is_file()


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part of a glob that has a wildcard in it."""
    folder = pattern
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def _missing(source: str, path: Path) -> UserError:
    """The error for a path that is not there, naming the nearest that is."""
    absent = path
    while not absent.parent.is_dir():
        absent = absent.parent
    siblings = [entry.name for entry in absent.parent.iterdir()]
    nearest = get_close_matches(absent.name, siblings, n=1)
    kinds = "a directory, a glob, or a file ending in " + ", ".join(TEXT_SUFFIXES)
    if nearest:
        near = absent.parent / nearest[0]
        return UserError(f"data source {source!r} does not exist; the nearest path is {str(near)!r}")
    if absent == path and len(path.parts) == 1 and not path.suffix:
        return UserError(f"{unknown('data source', source, [STDLIB])}; a source is {STDLIB!r}, {kinds}")
    return UserError(
        f"data source {source!r} does not exist: there is no {str(absent)!r}; a source is {kinds}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; "
            "convert it to UTF-8 or leave it out"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; mend its permissions or leave it out"
        ) from None


def _cut(name: str, path: Path) -> Iterator[Document]:
    """The file in pieces that end between paragraphs where they can, between lines where they must."""
    number, size, piece = 0, 0, list[str]()
    for line in _lines(_read(path)):
        piece.append(line)
        size += len(line)
        if size >= _PIECE_LONG or (size >= _PIECE_ENOUGH and line.isspace()):
            yield Document(f"{name}#{number}", "".join(piece))
            number, size, piece = number + 1, 0, []
    if piece:
        yield Document(f"{name}#{number}", "".join(piece))


def _lines(text: str) -> Iterator[str]:
    """The lines with their endings; one beyond the most a piece may hold comes in parts."""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), _PIECE_MOST):
            yield line[start : start + _PIECE_MOST]

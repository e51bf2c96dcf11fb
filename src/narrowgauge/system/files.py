"""Files that survive a kill and a power cut.

Three facts about file systems decide everything here:

1. `write` fills memory. Only `fsync(file)` puts the bytes on the disk.
2. `rename` is atomic: a reader sees the old name or the new one, never half of each. But the name itself
   lives in the directory, so only `fsync(directory)` makes the rename last.
3. A process can die between any two of these calls.

So a file, or a directory of files, is staged: it is written in full under a temporary name
(`.NAME.tmp-<nonce>`), synced and renamed, and then the parent directory is synced. In this order a reader
finds either the old content or the new.

Tests stop the process at any of these moments: with `NARROWGAUGE_CRASH_AT=<point>` in the environment the
process exits at that point with code 137, as after `kill -9`; `<point>@<rank>` selects one of several
processes. A file NAME has the points `write:NAME`, `synced:NAME` and `renamed:NAME`; a staged directory has
`exchange:filled` and `exchange:renamed`; a checkpoint's points are listed in
`narrowgauge.trainer.checkpoint.store.commit`.
"""

import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES, EEXIST, ELOOP, ENOENT, ENOTDIR, ENOTEMPTY, EPERM, EROFS
from importlib import resources
from io import BufferedReader
from pathlib import Path
from tempfile import gettempdir
from typing import Any, BinaryIO

from narrowgauge.system.errors import UserError, nearest, unknown
from narrowgauge.system.operating_system import O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK, user_id

CRASH_AT = "NARROWGAUGE_CRASH_AT"
_ABANDONED_S = 3600.0  # a staging directory without a write for an hour belongs to a dead process
_REFUSED = (ENOENT, ENOTDIR, EACCES, EPERM, EROFS)  # errors of a place where the user cannot create anything
_BLOCK = 1 << 20  # bytes hashed at a time


def crash_point(name: str) -> None:
    """Exit here without clean-up if the environment names this point."""
    requested = os.environ.get(CRASH_AT)
    if requested and (requested == name or requested == f"{name}@{_rank()}"):
        os._exit(137)


def _rank() -> int:
    """This process's rank in the job; 0 before torch has connected the processes."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist and dist.is_available() and dist.is_initialized() else 0


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an `OSError` name a file that is already open, as `write` and `fsync` do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def staged_file(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` if the block succeeds and vanishes otherwise."""
    staging = _staging(path)
    crash_point(f"write:{path.name}")
    file = staging.open("xb")
    try:
        with naming(path), file:
            yield file
            _sync(file)
        crash_point(f"synced:{path.name}")
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    crash_point(f"renamed:{path.name}")
    fsync_directory(path.parent)


def write_whole(path: Path, data: bytes | str) -> None:
    """Replace the content of `path`, text as UTF-8; after a crash it is the old content or the new."""
    with staged_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_new(path: Path, data: bytes) -> None:
    """Write and sync a file that must not exist yet, in a directory that is itself staged."""
    crash_point(f"write:{path.name}")
    with naming(path), path.open("xb") as file:
        file.write(data)
        _sync(file)
    crash_point(f"synced:{path.name}")


@contextmanager
def staged_directory(path: Path, keep_existing: bool = False) -> Iterator[Path]:
    """Create an empty directory that becomes `path` if the block succeeds and vanishes otherwise.

    An empty directory there is replaced, and missing parents are created. If another process has filled
    `path` meanwhile, `keep_existing` keeps its content and drops the new one; otherwise an existing `path` is
    an error, both before the block and after it. Staging directories of `path` that dead processes left an
    hour ago or earlier are removed.
    """
    path = Path(os.path.abspath(path))
    if not keep_existing:
        _refuse_existing(path)
    staging = _staging(path)
    try:
        make_directory(path.parent)
        _remove_abandoned(path)
        staging.mkdir()
    except OSError as error:
        if keep_existing or error.errno not in _REFUSED:
            raise
        raise UserError(f"{path} cannot be written: {error.strerror}; name another with --out") from None
    try:
        yield staging
        _sync_tree(staging)
        crash_point("exchange:filled")
        if not keep_existing:
            _refuse_existing(path)
        try:
            os.rename(staging, path)  # replaces an empty directory, fails on a filled one
        except OSError as error:
            if not keep_existing or error.errno not in (ENOTEMPTY, EEXIST):
                raise
        crash_point("exchange:renamed")
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _staging(path: Path, nonce: str = "") -> Path:
    return path.with_name(f".{path.name}.tmp-{nonce or secrets.token_hex(4)}")


def _refuse_existing(path: Path) -> None:
    is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty:
        raise UserError(f"{path} is there already, and nothing is ever overwritten; name another with --out")


def _remove_abandoned(path: Path) -> None:
    """Delete the staging directories of `path` that killed processes left behind."""
    pattern = _staging(Path(glob.escape(path.name)), nonce="*").name
    for staging in path.parent.glob(pattern):
        try:
            newest = max(entry.stat().st_mtime for entry in (staging, *staging.iterdir()))
        except OSError:  # a file, or its process is still alive and has just published or removed it
            continue
        if time.time() - newest > _ABANDONED_S:
            shutil.rmtree(staging, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    """Sync every file and name below `root` to the disk."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            with Path(directory, name).open("rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(directory))


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Sync a directory, so that files created in it, renamed into it or removed from it stay so."""
    descriptor = os.open(path, os.O_RDONLY | O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its parents (`mkdir -p`) durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file; an `OSError` with the reason refuses symbolic links, pipes and devices."""
    try:
        # without O_NONBLOCK, opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | O_NOFOLLOW | O_NONBLOCK)
    except OSError as error:
        if error.errno == ELOOP:
            raise OSError(ELOOP, "is a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file", str(path))
    return open(descriptor, "rb")


def sha256_of(path: Path, follow_links: bool = False, advance: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a regular file, or of where a link leads: 64 hexadecimal digits, as printed by `sha256sum`.

    `advance` is called with the number of bytes after each block read.
    """
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) if follow_links else open_regular(path) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            if advance is not None:
                advance(size)
    return digest.hexdigest()


def user_path(name: str | Path) -> Path:
    """A path as a user writes it: `~` and `~USER` are a home where there is one, else plain names."""
    return Path(os.path.expanduser(name))


def cache_directory() -> Path:
    """$NARROWGAUGE_CACHE, or `narrowgauge` in the user's cache directory: for data prepared once.

    A user without a home, as in a container that runs with any number, has a temporary one.
    """
    if directory := os.environ.get("NARROWGAUGE_CACHE"):
        return user_path(directory)
    base = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base / "narrowgauge" if base.is_absolute() else Path(gettempdir()) / f"narrowgauge-{user_id()}"


def cache_entry(folder: str, *facts: object) -> Path:
    """The file in a folder of the cache for what depends on these facts alone, such as versions."""
    return cache_directory() / folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"


def write_cached(entry: Path, value: Any) -> None:
    """Write JSON values to an entry of the cache, if it can be written."""
    with suppress(OSError):
        make_directory(entry.parent)
        write_whole(entry, json.dumps(value))


def package_digest() -> str:
    """SHA-256 of this package's files and their names: an editable install changes under one version."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(p for p in root.rglob("*.*") if p.suffix != ".pyc" and p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def shipped_names(folder: str) -> list[str]:
    """Sorted names, without `.toml`, of the TOML files in a folder of this package."""
    files = resources.files("narrowgauge").joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def shipped_text(folder: str, name: str) -> str:
    """The text of NAME.toml in a folder of this package, such as `recipes/shipped`."""
    return resources.files("narrowgauge").joinpath(folder, f"{name}.toml").read_text(encoding="utf-8")


def unknown_name(kind: str, name: str, shipped: Iterable[str]) -> UserError:
    """The error for a name that neither ships nor ends in `.toml`; it suggests a file where one is near."""
    names = list(shipped)
    if (Path(name).suffix or nearest(name, names) is None) and (near := _nearest_file(name)):
        return UserError(f"unknown {kind} {name!r}; write {near}, which is there")
    return unknown(kind, name, names, "FILE.toml")


def named_text(kind: str, name: str, shipped: Sequence[str] = ()) -> str:
    """The text of a `.toml` file; `kind` and `shipped`, the names that would be right, are for the error."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        near = _nearest_file(name) or nearest(name, shipped)
        hint = f"; the nearest is {near}" if near else ""
        ship = f"; name a .toml file, or one that ships: {', '.join(shipped)}" if shipped else ""
        raise UserError(f"{kind} file {name} does not exist{hint}{ship}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{kind} file {name} cannot be read: {error}") from None


def _nearest_file(name: str) -> str | None:
    """The `.toml` file in the directory of a path whose name is nearest."""
    files = {path.stem: str(path) for path in sorted(Path(name).parent.glob("*.toml"))}
    return files.get(nearest(Path(name).stem, files) or "")

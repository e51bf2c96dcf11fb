"""The manifest of a published directory, and the check against it.

`manifest.json` lists each file of the directory with its size and SHA-256, and carries a digest of itself:

    {
     "files": {"model.safetensors": {"sha256": "...", "size": 1234}, ...},
     "run_id": "...",
     "sha256": "...",        of this text without this line's value
     "step": 20,
     "version": 1
    }

The text is canonical (sorted keys, fixed layout), and any other text is refused, which detects any flipped
bit and duplicate names. A digest shows damage but is not a signature: anyone can forge a manifest together
with its files. A forged one is harmless, because file names are plain names, only regular files are opened,
and nothing that is read is ever executed.

A file that this process has written or hashed is assumed unchanged while its inode, size and times are: a
writer changes them, and only a disk that loses bits by itself does not. Otherwise, counting the valid
checkpoints before an old one is removed would read each of them at each save. At every start of a run
everything is hashed again.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import open_regular, sha256_of

MANIFEST = "manifest.json"
VERSION = 1
MAX_BYTES = 16 << 20  # size of a manifest: bounds the memory that a hostile one can use
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Name, inode, size and times of each file of the directories that this process has written or verified.
_Fingerprint = frozenset[tuple[str, int, int, int, int]]
_verified: dict[Path, _Fingerprint | None] = {}


class DamagedError(UserError):
    """A checkpoint does not agree with its manifest; the message names the file and the reason."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    run_id: str
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """The canonical text, with its own digest."""
        content = {**asdict(self), "sha256": "", "version": VERSION}
        content["sha256"] = hashlib.sha256(_text(content).encode()).hexdigest()
        return _text(content)


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def plain_name(name: str) -> bool:
    """Whether a name stays inside its directory: letters, digits, `_`, `-`, `.`; no dot or dash first."""
    return _PLAIN_NAME.fullmatch(name) is not None


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest and check everything that needs no other file."""
    path = directory / MANIFEST
    data = read_bounded(path, MAX_BYTES)
    content = json_object(data, lambda reason: DamagedError(f"{path} {reason}"))
    version = content.get("version")
    if type(version) is int and version > VERSION:
        raise DamagedError(
            f"{path} has version {version}, and this narrowgauge reads up to {VERSION}; use a newer one"
        )
    try:
        manifest = _from_json(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} does not have the layout of version {VERSION} ({error})") from error
    if manifest.to_json().encode() != data:
        raise DamagedError(f"{path} was changed after it was written: it does not agree with its own digest")
    return manifest


def _from_json(content: Mapping[str, Any]) -> Manifest:
    """The manifest in parsed JSON; AttributeError, KeyError, TypeError or ValueError if it is malformed."""
    files = {}
    for name, entry in content["files"].items():
        if not plain_name(name) or name == MANIFEST:
            raise ValueError(f"{name!r} is not a plain file name")
        size, sha256 = entry["size"], entry["sha256"]
        if type(size) is not int or size < 0 or not _SHA256.fullmatch(sha256):
            raise ValueError(f"size or sha256 of {name!r}")
        files[name] = FileEntry(size, sha256)
    step, run_id = content["step"], content["run_id"]
    if type(step) is not int or step < 0 or not isinstance(run_id, str):
        raise ValueError("step or run_id")
    return Manifest(step, run_id, files)


def verify(
    directory: Path, run_id: str | None = None, cores: int | None = None, reread: bool = True
) -> Manifest:
    """Check a published directory step-N in full: its name, the set of files, each size, each SHA-256.

    With `run_id` it must belong to that run. `cores` files are hashed at a time; None = one on each core. If
    not `reread`, files that this process has verified are not read while they are unchanged. The
    `DamagedError` names the file and the reason, also if the operating system cannot read it.
    """
    manifest, known = verify_listing(directory, run_id), _verified.get(directory.absolute())
    if reread or known is None or known != _fingerprint(directory):
        verify_files(directory, manifest, manifest.files, cores)
        add_verified(directory)
    return manifest


def add_verified(directory: Path) -> None:
    """Record that every byte of the directory has just been written or verified."""
    _verified[directory.absolute()] = _fingerprint(directory)


def drop_verified(directory: Path) -> None:
    """Forget a directory that is being removed."""
    _verified.pop(directory.absolute(), None)


def _fingerprint(directory: Path) -> _Fingerprint | None:
    try:
        with os.scandir(directory) as entries:
            stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None
    return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)


def verify_listing(directory: Path, run_id: str | None = None) -> Manifest:
    """The part of `verify` that reads only the manifest."""
    if directory.is_symlink() or not directory.is_dir():
        raise DamagedError(f"{directory} is a link or not a directory")
    manifest = read_manifest(directory)
    if directory.name != f"step-{manifest.step}":
        raise DamagedError(
            f"{directory / MANIFEST} is of step {manifest.step}, which is not its directory's name"
        )
    if run_id is not None and manifest.run_id != run_id:
        raise DamagedError(
            f"{directory / MANIFEST} is of run {manifest.run_id!r}, but this run is {run_id!r}"
        )
    _compare_names(directory, manifest)
    return manifest


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str], cores: int | None = None) -> None:
    """Check files against their entries; the `DamagedError` names the smallest bad file."""
    order = sorted(names, key=lambda name: manifest.files[name].size)  # the cheap ones first
    if cores == 1:
        for name in order:
            verify_file(directory / name, manifest.files[name])
        return
    with ThreadPoolExecutor(cores or os.cpu_count()) as pool:
        for _ in pool.map(lambda name: verify_file(directory / name, manifest.files[name]), order):
            pass


def _compare_names(directory: Path, manifest: Manifest) -> None:
    try:
        existing, listed = set(os.listdir(directory)), {*manifest.files, MANIFEST}
    except OSError as error:
        raise DamagedError(f"{directory} cannot be read: {error.strerror}") from error
    if missing := sorted(listed - existing):
        raise DamagedError(f"{directory / missing[0]} is missing, though the manifest lists it")
    if extra := sorted(existing - listed):
        raise DamagedError(
            f"{directory / extra[0]} is not in the manifest: nothing may be added to a checkpoint"
        )


def verify_file(path: Path, entry: FileEntry) -> None:
    """Check one file against its entry."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry.size:
            raise DamagedError(f"{path} has {size} bytes, but its manifest lists {entry.size}")
        digest = sha256_of(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    if digest != entry.sha256:
        raise DamagedError(
            f"{path} was changed: its sha256 is {digest[:16]}..., its manifest lists {entry.sha256[:16]}..."
        )


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file; a `DamagedError` if it exceeds `limit` bytes or cannot be read."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise DamagedError(f"{path} is larger than {limit} bytes")
    return data


def json_object(data: bytes, fault: Callable[[str], UserError]) -> dict[str, Any]:
    """The JSON object that a file holds; `fault` makes the error for a file that "is not" one."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise fault(f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise fault("is not one JSON object")
    return content

"""The commit protocol of checkpoints: a step becomes visible in full or not at all.

The life of RUN/checkpoints/step-20, in order:

    begin     create the staging directory step-20.tmp-<nonce>/; remove dead processes' directories
    (write)   one process, or several together, write files into it, and sync and hash each
    seal      write and sync manifest.json, then sync the names in the staging directory
    publish   rename the staging directory to step-20, then sync the parent directory
    retain    remove steps older than the newest `keep` valid ones

Only a name `step-N` without a suffix counts, so a process that dies before the rename leaves the old
checkpoints, and one that dies after it leaves the new one as well. A published directory is never written
into. Once step N is published, the run is at step N. Whatever already exists under N (damaged, or from a
future that a rollback abandoned) or under larger numbers is quarantined as `step-M.aside-<nonce>`, and
removed when the run has moved past it.

Crash points (see `narrowgauge.system.files`): `begun`, `write:manifest.json`, `synced:manifest.json`,
`sealed`, `publish` before the rename, `published` after it, `durable` after the parent is synced,
`set-aside:NAME` before a directory is quarantined, `purge:NAME` before one is removed, `purging:NAME` when it
has lost its name but still has its files, `purged:NAME` after it.
"""

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import crash_point, fsync_directory, make_directory, write_new
from narrowgauge.trainer.checkpoint.store.manifest import (
    MANIFEST,
    DamagedError,
    FileEntry,
    Manifest,
    add_verified,
    drop_verified,
    verify,
)

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_STAGING = re.compile(r"step-[0-9]+\.tmp-.*")
_QUARANTINED = re.compile(r"step-([0-9]+)\.aside-.*")


def steps(directory: Path) -> list[int]:
    """Numbers of the published steps, ascending, valid or not; [] if the directory does not exist."""
    return sorted(int(match[1]) for name in _names(directory) if (match := _STEP.fullmatch(name)))


def newest_valid(directory: Path, run_id: str | None = None) -> tuple[Path | None, list[str]]:
    """The newest step that verifies (None: nothing was published), and a sentence for each newer one.

    With `run_id` a step must belong to that run. If steps were published and none is valid, a `UserError` is
    raised: a run never silently restarts from step 0.
    """
    refused = []
    for step in reversed(steps(directory)):
        path = directory / f"step-{step}"
        try:
            verify(path, run_id)
        except DamagedError as error:
            refused.append(str(error))
        else:
            return path, refused
    quarantined = [
        f"{directory / name} was set aside"
        for name in sorted(_names(directory))
        if _QUARANTINED.fullmatch(name)
    ]
    if refused or quarantined:
        reasons = "; ".join(refused + quarantined)
        raise UserError(
            f"{str(directory)!r} has checkpoints, but none that can be used ({reasons}), "
            f"and a run does not start again from step 0 unasked; restore a step from a copy, or delete that "
            f"directory to start over"
        )
    return None, []


def begin(directory: Path, step: int) -> Path:
    """Create an empty staging directory for a step, and remove dead processes' directories.

    The caller holds the run's lock, so any other staging directory belongs to a dead process.
    """
    make_directory(directory)
    for name in os.listdir(directory):
        if _STAGING.fullmatch(name):
            _remove(directory / name)
    staging = directory / f"step-{step}.tmp-{secrets.token_hex(4)}"
    staging.mkdir()
    crash_point("begun")
    return staging


def seal(staging: Path, step: int, run_id: str, files: Mapping[str, FileEntry]) -> Manifest:
    """Write the manifest of a staging directory that is otherwise complete and synced."""
    manifest = Manifest(step, run_id, files)
    write_new(staging / MANIFEST, manifest.to_json().encode())
    fsync_directory(staging)
    crash_point("sealed")
    return manifest


def publish(staging: Path, manifest: Manifest) -> Path:
    """Rename a sealed staging directory to its step, quarantine newer steps, and return the path of step-N.

    If step-N already exists, valid and with the same content, it is kept, and the caller removes the staging
    directory.
    """
    directory, final = staging.parent, staging.parent / f"step-{manifest.step}"
    if _valid(final, manifest.run_id, reread=True) != manifest:
        if os.path.lexists(final):
            _quarantine(final)
        crash_point("publish")
        os.rename(staging, final)
        add_verified(final)
        crash_point("published")
        fsync_directory(directory)
        crash_point("durable")
    for newer in steps(directory):
        if newer > manifest.step:
            _quarantine(directory / f"step-{newer}")
    return final


def retain(directory: Path, keep: int, published: Manifest) -> None:
    """Remove everything older than the newest `keep` valid steps.

    A step counts as valid only if every byte of it verifies, so a damaged one never takes the place of a good
    one.
    """
    assert keep >= 2, "with fewer than two checkpoints, one bad disk block ends the run"
    oldest, valid = published.step, 1
    for step in reversed(steps(directory)):
        if valid == keep:
            break
        if step < published.step and _valid(directory / f"step-{step}", published.run_id, reread=False):
            oldest, valid = step, valid + 1
    if valid < keep:
        return
    for name in sorted(_names(directory)):
        match = _STEP.fullmatch(name) or _QUARANTINED.fullmatch(name)
        if match and int(match[1]) < oldest:
            crash_point(f"purge:{name}")
            _remove(directory / name)
            crash_point(f"purged:{name}")


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"{str(directory)!r} cannot be read as a directory of checkpoints: {error.strerror}"
        ) from error


def _valid(path: Path, run_id: str, reread: bool) -> Manifest | None:
    """The manifest of a published step that is valid; None of another."""
    with suppress(DamagedError):
        return verify(path, run_id, cores=1, reread=reread)  # training needs the other cores
    return None


def _quarantine(path: Path) -> None:
    crash_point(f"set-aside:{path.name}")
    os.rename(path, path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))


def _remove(path: Path) -> None:
    """Remove a directory. It is renamed first, so that a partly removed one is never taken for a step."""
    drop_verified(path)
    if _STEP.fullmatch(path.name):
        doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        os.rename(path, doomed)
        crash_point(f"purging:{path.name}")
        path = doomed
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

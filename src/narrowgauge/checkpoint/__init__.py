"""How is a run kept? Checkpoints that are published whole or not at all, and the files a run writes.

Read `publication` for the protocol, `manifest` for the check, `store` for what is inside, `files` for the
three facts about disks that everything here follows from, `lock` for who may write.
"""

from narrowgauge.checkpoint.files import (
    append_line,
    append_lines,
    fsync_directory,
    make_directory,
    read_jsonl,
    sha256_of,
    write_whole,
)
from narrowgauge.checkpoint.finite import JSON, PoisonedError, is_finite
from narrowgauge.checkpoint.lock import lock_run
from narrowgauge.checkpoint.manifest import DamagedError, FileEntry, Manifest, read_manifest, verify
from narrowgauge.checkpoint.publication import newest_valid, steps
from narrowgauge.checkpoint.store import Checkpoint, SaveError, load, save

__all__ = [
    "JSON",
    "Checkpoint",
    "DamagedError",
    "FileEntry",
    "Manifest",
    "PoisonedError",
    "SaveError",
    "append_line",
    "append_lines",
    "fsync_directory",
    "is_finite",
    "load",
    "lock_run",
    "make_directory",
    "newest_valid",
    "read_jsonl",
    "read_manifest",
    "save",
    "sha256_of",
    "steps",
    "verify",
    "write_whole",
]

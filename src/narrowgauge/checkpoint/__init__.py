"""How is a run kept? Checkpoints that are published whole or not at all, and the files a run writes.

Read `store` for what is inside and how several processes write it, `publication` for how it becomes visible,
`manifest` for the check, `restore` for reading it back on any number of processes, `background` for saving
beside the steps, `files` for the three facts about disks that everything here follows from, `lock` for who
may write.
"""

from narrowgauge.checkpoint.store.async_save import AsyncSaver
from narrowgauge.checkpoint.store.commit import newest_valid, steps
from narrowgauge.checkpoint.store.disk_space import SaveError, require_space
from narrowgauge.checkpoint.store.lock import lock_run
from narrowgauge.checkpoint.store.manifest import DamagedError, FileEntry, Manifest, read_manifest, verify
from narrowgauge.checkpoint.store.nonfinite import JSON, PoisonedError, is_finite
from narrowgauge.checkpoint.store.restore import Checkpoint, choose_step, load, restore_distributed
from narrowgauge.checkpoint.store.save import Save, plan_save, save, save_distributed
from narrowgauge.checkpoint.store.slices import LocalTensor, LocalTensors, full_tensor
from narrowgauge.files import (
    append_line,
    append_lines,
    fsync_directory,
    make_directory,
    read_jsonl,
    sha256_of,
    write_whole,
)

__all__ = [
    "JSON",
    "AsyncSaver",
    "Checkpoint",
    "DamagedError",
    "FileEntry",
    "LocalTensor",
    "LocalTensors",
    "Manifest",
    "PoisonedError",
    "Save",
    "SaveError",
    "append_line",
    "append_lines",
    "choose_step",
    "fsync_directory",
    "full_tensor",
    "is_finite",
    "load",
    "lock_run",
    "make_directory",
    "newest_valid",
    "plan_save",
    "read_jsonl",
    "read_manifest",
    "require_space",
    "restore_distributed",
    "save",
    "save_distributed",
    "sha256_of",
    "steps",
    "verify",
    "write_whole",
]

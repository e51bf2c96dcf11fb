"""How is a run kept? Checkpoints that are published in full or not at all.

`store` is a run's own format. Read `save` for what is inside and how several processes write it, `commit`
for how it becomes visible, `manifest` for the check, `restore` for reading it back on any number of
processes, `async_save` for saves in the background, `lock` for one run at a time. `narrowgauge.files` has the
three facts about disks that all of it follows from. `interop` reads and writes the models of other programs.
"""

from narrowgauge.checkpoint.store.async_save import AsyncSaver
from narrowgauge.checkpoint.store.commit import newest_valid, steps
from narrowgauge.checkpoint.store.disk_space import DiskSpace, SaveError, free_space, require_space_for_run
from narrowgauge.checkpoint.store.lock import is_abandoned, lock_run
from narrowgauge.checkpoint.store.manifest import DamagedError, FileEntry, Manifest, read_manifest, verify
from narrowgauge.checkpoint.store.nonfinite import JSON, PoisonedError, is_finite
from narrowgauge.checkpoint.store.restore import (
    Checkpoint,
    choose_step,
    load,
    read_state,
    restore_distributed,
)
from narrowgauge.checkpoint.store.save import SavePlan, plan_save, save
from narrowgauge.checkpoint.store.slices import LocalTensor, LocalTensors, full_tensor

__all__ = [
    "JSON",
    "AsyncSaver",
    "Checkpoint",
    "DamagedError",
    "DiskSpace",
    "FileEntry",
    "LocalTensor",
    "LocalTensors",
    "Manifest",
    "PoisonedError",
    "SaveError",
    "SavePlan",
    "choose_step",
    "free_space",
    "full_tensor",
    "is_abandoned",
    "is_finite",
    "load",
    "lock_run",
    "newest_valid",
    "plan_save",
    "read_manifest",
    "read_state",
    "require_space_for_run",
    "restore_distributed",
    "save",
    "steps",
    "verify",
]

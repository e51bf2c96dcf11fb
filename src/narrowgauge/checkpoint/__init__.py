"""Checkpoints, which are published in full or not at all.

`store` is a run's own format. Read `save` for its content and how several processes write it, `commit` for
how it becomes visible, `manifest` for verification, `restore` for reading it back on any number of processes,
`async_save` for saves in the background, and `lock` for one run at a time. `narrowgauge.files` states the
three facts about disks on which all of it rests. `interop` reads and writes the models of other programs.
"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.checkpoint.store.async_save import AsyncSaver as AsyncSaver
    from narrowgauge.checkpoint.store.commit import newest_valid as newest_valid
    from narrowgauge.checkpoint.store.commit import steps as steps
    from narrowgauge.checkpoint.store.disk_space import DiskSpace as DiskSpace
    from narrowgauge.checkpoint.store.disk_space import SaveError as SaveError
    from narrowgauge.checkpoint.store.disk_space import free_space as free_space
    from narrowgauge.checkpoint.store.disk_space import require_space_for_run as require_space_for_run
    from narrowgauge.checkpoint.store.lock import is_abandoned as is_abandoned
    from narrowgauge.checkpoint.store.lock import lock_run as lock_run
    from narrowgauge.checkpoint.store.manifest import DamagedError as DamagedError
    from narrowgauge.checkpoint.store.manifest import FileEntry as FileEntry
    from narrowgauge.checkpoint.store.manifest import Manifest as Manifest
    from narrowgauge.checkpoint.store.manifest import read_manifest as read_manifest
    from narrowgauge.checkpoint.store.manifest import verify as verify
    from narrowgauge.checkpoint.store.nonfinite import JSON as JSON
    from narrowgauge.checkpoint.store.nonfinite import PoisonedError as PoisonedError
    from narrowgauge.checkpoint.store.nonfinite import is_finite as is_finite
    from narrowgauge.checkpoint.store.restore import Checkpoint as Checkpoint
    from narrowgauge.checkpoint.store.restore import choose_step as choose_step
    from narrowgauge.checkpoint.store.restore import load as load
    from narrowgauge.checkpoint.store.restore import read_state as read_state
    from narrowgauge.checkpoint.store.restore import restore_distributed as restore_distributed
    from narrowgauge.checkpoint.store.save import SavePlan as SavePlan
    from narrowgauge.checkpoint.store.save import plan_save as plan_save
    from narrowgauge.checkpoint.store.save import save as save
    from narrowgauge.checkpoint.store.slices import LocalTensor as LocalTensor
    from narrowgauge.checkpoint.store.slices import LocalTensors as LocalTensors
    from narrowgauge.checkpoint.store.slices import full_tensor as full_tensor
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

"""Checkpoints, which are published in full or not at all.

`store` is a run's own format. Read `save` for its content and how several processes write it, `commit` for
how it becomes visible, `manifest` for verification, `restore` for reading it back on any number of processes,
`async_save` for saves in the background, and `lock` for one run at a time. `narrowgauge.system.files` states
the three facts about disks on which all of it rests. `interop` reads and writes the models of other programs.
"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.checkpoint.store.async_save import AsyncSaver as AsyncSaver
    from narrowgauge.trainer.checkpoint.store.commit import newest_valid as newest_valid
    from narrowgauge.trainer.checkpoint.store.commit import steps as steps
    from narrowgauge.trainer.checkpoint.store.disk_space import DiskSpace as DiskSpace
    from narrowgauge.trainer.checkpoint.store.disk_space import SaveError as SaveError
    from narrowgauge.trainer.checkpoint.store.disk_space import free_space as free_space
    from narrowgauge.trainer.checkpoint.store.disk_space import require_space_for_run as require_space_for_run
    from narrowgauge.trainer.checkpoint.store.lock import is_abandoned as is_abandoned
    from narrowgauge.trainer.checkpoint.store.lock import lock_run as lock_run
    from narrowgauge.trainer.checkpoint.store.manifest import DamagedError as DamagedError
    from narrowgauge.trainer.checkpoint.store.manifest import FileEntry as FileEntry
    from narrowgauge.trainer.checkpoint.store.manifest import Manifest as Manifest
    from narrowgauge.trainer.checkpoint.store.manifest import read_manifest as read_manifest
    from narrowgauge.trainer.checkpoint.store.manifest import verify as verify
    from narrowgauge.trainer.checkpoint.store.nonfinite import JSON as JSON
    from narrowgauge.trainer.checkpoint.store.nonfinite import PoisonedError as PoisonedError
    from narrowgauge.trainer.checkpoint.store.nonfinite import is_finite as is_finite
    from narrowgauge.trainer.checkpoint.store.restore import Checkpoint as Checkpoint
    from narrowgauge.trainer.checkpoint.store.restore import choose_step as choose_step
    from narrowgauge.trainer.checkpoint.store.restore import load as load
    from narrowgauge.trainer.checkpoint.store.restore import read_state as read_state
    from narrowgauge.trainer.checkpoint.store.restore import restore_distributed as restore_distributed
    from narrowgauge.trainer.checkpoint.store.save import SavePlan as SavePlan
    from narrowgauge.trainer.checkpoint.store.save import plan_save as plan_save
    from narrowgauge.trainer.checkpoint.store.save import save as save
    from narrowgauge.trainer.checkpoint.store.slices import LocalTensor as LocalTensor
    from narrowgauge.trainer.checkpoint.store.slices import LocalTensors as LocalTensors
    from narrowgauge.trainer.checkpoint.store.slices import full_tensor as full_tensor
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

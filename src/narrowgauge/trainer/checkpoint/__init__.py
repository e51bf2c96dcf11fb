"""Checkpoints, which are published in full or not at all.

`store` is a run's own format. Read `save` for its content and how several processes write it, at once or in
the background, `commit` for how it becomes visible, `manifest` for verification, `restore` for reading it
back on any number of processes, and `lock` for one run at a time. `narrowgauge.system.files` states the three
facts about disks on which all of it rests. `interop` reads and writes the models of other programs.
"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.checkpoint.store.before_save import JSON as JSON
    from narrowgauge.trainer.checkpoint.store.before_save import SaveError as SaveError
    from narrowgauge.trainer.checkpoint.store.before_save import is_finite as is_finite
    from narrowgauge.trainer.checkpoint.store.before_save import (
        require_space_for_run as require_space_for_run,
    )
    from narrowgauge.trainer.checkpoint.store.commit import newest_valid as newest_valid
    from narrowgauge.trainer.checkpoint.store.commit import steps as steps
    from narrowgauge.trainer.checkpoint.store.index import LocalTensor as LocalTensor
    from narrowgauge.trainer.checkpoint.store.index import LocalTensors as LocalTensors
    from narrowgauge.trainer.checkpoint.store.lock import is_abandoned as is_abandoned
    from narrowgauge.trainer.checkpoint.store.lock import lock_run as lock_run
    from narrowgauge.trainer.checkpoint.store.manifest import DamagedError as DamagedError
    from narrowgauge.trainer.checkpoint.store.manifest import verify as verify
    from narrowgauge.trainer.checkpoint.store.restore import Checkpoint as Checkpoint
    from narrowgauge.trainer.checkpoint.store.restore import choose_step as choose_step
    from narrowgauge.trainer.checkpoint.store.restore import load as load
    from narrowgauge.trainer.checkpoint.store.restore import read_state as read_state
    from narrowgauge.trainer.checkpoint.store.restore import restore_distributed as restore_distributed
    from narrowgauge.trainer.checkpoint.store.save import AsyncSaver as AsyncSaver
    from narrowgauge.trainer.checkpoint.store.save import SavePlan as SavePlan
    from narrowgauge.trainer.checkpoint.store.save import plan_save as plan_save
    from narrowgauge.trainer.checkpoint.store.save import save as save
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

"""Distributed training: how a run is spread over devices.

The names below are imported on first use (`lazy`): the doctor and the command line read a launcher's
variables even where torch cannot be imported.
"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.distributed.launch.world import NotStartedBySrun as NotStartedBySrun
    from narrowgauge.trainer.distributed.launch.world import World as World
    from narrowgauge.trainer.distributed.launch.world import reports_for_all as reports_for_all
    from narrowgauge.trainer.distributed.launch.world import world_from as world_from
    from narrowgauge.trainer.distributed.parallel.check_degrees import check_degrees as check_degrees
    from narrowgauge.trainer.distributed.parallel.engine import Engine as Engine
    from narrowgauge.trainer.distributed.parallel.parallelize import ModelSpec as ModelSpec
    from narrowgauge.trainer.distributed.parallel.parallelize import parallelize as parallelize
    from narrowgauge.trainer.distributed.pipeline import MicroBatch as MicroBatch
    from narrowgauge.trainer.distributed.process_group.coordinator import START as START
    from narrowgauge.trainer.distributed.process_group.coordinator import Coordinator as Coordinator
    from narrowgauge.trainer.distributed.process_group.coordinator import (
        init_process_group as init_process_group,
    )
    from narrowgauge.trainer.distributed.process_group.store import NEVER as NEVER
    from narrowgauge.trainer.distributed.process_group.store import RENDEZVOUS as RENDEZVOUS
    from narrowgauge.trainer.distributed.process_group.store import StoppedByPeer as StoppedByPeer
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

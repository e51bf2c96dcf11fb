"""How is a run spread over devices?

The names below are imported when they are first used (`lazy`): the doctor and the command read a launcher's
variables where torch does not import.
"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.distributed.comm.byte_counter import CommCounter
    from narrowgauge.distributed.data_parallel import fully_shard, prepare_ddp
    from narrowgauge.distributed.launch.launcher_env import NotStartedBySrun, reports_for_all
    from narrowgauge.distributed.launch.world import World, world_from
    from narrowgauge.distributed.mesh import Mesh, ParallelDims, resolve_dims
    from narrowgauge.distributed.parallel.check_blocks import check_blocks
    from narrowgauge.distributed.parallel.engine import Engine
    from narrowgauge.distributed.parallel.expert_parallel import check_expert_parallel
    from narrowgauge.distributed.parallel.parallelize import ModelSpec, parallelize
    from narrowgauge.distributed.parallel.tensor_parallel import check_tensor_parallel
    from narrowgauge.distributed.pipeline_stage import MicroBatch
    from narrowgauge.distributed.process_group.coordinator import START, Coordinator, init_process_group
    from narrowgauge.distributed.process_group.failure import StoppedByPeer
    from narrowgauge.distributed.process_group.rendezvous import NEVER, RENDEZVOUS
    from narrowgauge.distributed.simulate.fake_fsdp import full_weights
    from narrowgauge.distributed.simulate.fake_mesh import fake_mesh

__all__ = [
    "NEVER",
    "RENDEZVOUS",
    "START",
    "CommCounter",
    "Coordinator",
    "Engine",
    "Mesh",
    "MicroBatch",
    "ModelSpec",
    "NotStartedBySrun",
    "ParallelDims",
    "StoppedByPeer",
    "World",
    "check_blocks",
    "check_expert_parallel",
    "check_tensor_parallel",
    "fake_mesh",
    "full_weights",
    "fully_shard",
    "init_process_group",
    "parallelize",
    "prepare_ddp",
    "reports_for_all",
    "resolve_dims",
    "world_from",
]

__getattr__ = import_on_use(
    __name__,
    {
        "comm.byte_counter": ("CommCounter",),
        "data_parallel": ("fully_shard", "prepare_ddp"),
        "launch.launcher_env": ("NotStartedBySrun", "reports_for_all"),
        "launch.world": ("World", "world_from"),
        "mesh": ("Mesh", "ParallelDims", "resolve_dims"),
        "parallel.check_blocks": ("check_blocks",),
        "parallel.engine": ("Engine",),
        "parallel.expert_parallel": ("check_expert_parallel",),
        "parallel.parallelize": ("ModelSpec", "parallelize"),
        "parallel.tensor_parallel": ("check_tensor_parallel",),
        "pipeline_stage": ("MicroBatch",),
        "process_group.coordinator": ("START", "Coordinator", "init_process_group"),
        "process_group.failure": ("StoppedByPeer",),
        "process_group.rendezvous": ("NEVER", "RENDEZVOUS"),
        "simulate.fake_fsdp": ("full_weights",),
        "simulate.fake_mesh": ("fake_mesh",),
    },
)

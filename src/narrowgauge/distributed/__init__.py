"""How is a run spread over devices?"""

from narrowgauge.distributed.comm.byte_counter import CommCounter
from narrowgauge.distributed.data_parallel import fully_shard, prepare_ddp
from narrowgauge.distributed.launch.launcher_env import NotStartedBySrun, reports_for_all
from narrowgauge.distributed.launch.world import World, world_from
from narrowgauge.distributed.mesh import Mesh, ParallelDims, resolve_dims
from narrowgauge.distributed.parallel.check_blocks import check_blocks
from narrowgauge.distributed.parallel.engine import Engine
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

"""How is a run spread over devices?"""

from narrowgauge.distributed.comm.byte_counter import Traffic
from narrowgauge.distributed.launch.launcher_env import speaks_for_all
from narrowgauge.distributed.launch.world import World, world_from
from narrowgauge.distributed.mesh import Layout, Mesh, fit
from narrowgauge.distributed.parallel.check_blocks import check_blocks
from narrowgauge.distributed.parallel.engine import Engine
from narrowgauge.distributed.parallel.parallelize import Plan, build
from narrowgauge.distributed.parallel.pipeline_stage import MicroBatch
from narrowgauge.distributed.parallel.tensor_parallel import check_division
from narrowgauge.distributed.process_group.coordinator import START, Crew, joined
from narrowgauge.distributed.process_group.failure import Stopped
from narrowgauge.distributed.process_group.rendezvous import MEETING, NEVER
from narrowgauge.distributed.simulate.fake_fsdp import whole_weights
from narrowgauge.distributed.simulate.fake_mesh import imagined

__all__ = [
    "MEETING",
    "NEVER",
    "START",
    "Crew",
    "Engine",
    "Layout",
    "Mesh",
    "MicroBatch",
    "Plan",
    "Stopped",
    "Traffic",
    "World",
    "build",
    "check_blocks",
    "check_division",
    "fit",
    "imagined",
    "joined",
    "speaks_for_all",
    "whole_weights",
    "world_from",
]

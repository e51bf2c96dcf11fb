"""How is a run spread over devices?"""

from narrowgauge.distributed.build import Plan, build
from narrowgauge.distributed.crew import START, Crew, joined
from narrowgauge.distributed.divide import check_division
from narrowgauge.distributed.ending import Stopped
from narrowgauge.distributed.engine import Engine
from narrowgauge.distributed.imagined import imagined
from narrowgauge.distributed.imagined_shards import whole_weights
from narrowgauge.distributed.launchers import speaks_for_all
from narrowgauge.distributed.meeting import MEETING, NEVER
from narrowgauge.distributed.mesh import Layout, Mesh, fit
from narrowgauge.distributed.stages import MicroBatch
from narrowgauge.distributed.traffic import Traffic
from narrowgauge.distributed.whole_blocks import check_blocks
from narrowgauge.distributed.world import World, world_from

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

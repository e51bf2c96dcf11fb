"""How is a run spread over devices?"""

from narrowgauge.distributed.build import Plan, build
from narrowgauge.distributed.divide import check_division
from narrowgauge.distributed.engine import Engine
from narrowgauge.distributed.mesh import Layout, Mesh, fit
from narrowgauge.distributed.stages import MicroBatch
from narrowgauge.distributed.world import World, world_from

__all__ = [
    "Engine",
    "Layout",
    "Mesh",
    "MicroBatch",
    "Plan",
    "World",
    "build",
    "check_division",
    "fit",
    "world_from",
]

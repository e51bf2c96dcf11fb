"""How is a run spread over devices?"""

from narrowgauge.distributed.crew import START, Crew, joined
from narrowgauge.distributed.ending import Stopped
from narrowgauge.distributed.launchers import speaks_for_all
from narrowgauge.distributed.world import World, world_from

__all__ = ["START", "Crew", "Stopped", "World", "joined", "speaks_for_all", "world_from"]

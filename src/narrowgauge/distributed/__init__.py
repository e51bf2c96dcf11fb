"""How is a run spread over devices?"""

from narrowgauge.distributed.world import World, world_from

__all__ = ["World", "world_from"]

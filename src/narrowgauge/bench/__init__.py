"""How fast is a step, how fast could it be on this machine, and how fast are others at the same?"""

from narrowgauge.bench.bench import bench

__all__ = ["bench"]

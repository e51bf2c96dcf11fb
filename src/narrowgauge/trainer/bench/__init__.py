"""The speed of a step, its floor on this machine, and the speed of peers."""

from narrowgauge.trainer.bench.bench import bench

__all__ = ["bench"]

"""Where does it run, and at what cost?"""

from narrowgauge.cluster.plan import print_plan

__all__ = ["print_plan"]

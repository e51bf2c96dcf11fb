"""Where does it run, and at what cost?"""

from narrowgauge.cluster.doctor import as_json, examine, print_items
from narrowgauge.cluster.plan import print_plan

__all__ = ["as_json", "examine", "print_items", "print_plan"]

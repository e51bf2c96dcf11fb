"""Where does it run, and at what cost?"""

from narrowgauge.cluster.doctor import as_json, examine, print_items
from narrowgauge.cluster.plan import print_plan
from narrowgauge.cluster.scaling import Scaling, read_sizes, scaling
from narrowgauge.cluster.scaling_rank import measure
from narrowgauge.cluster.scaling_table import print_scaling
from narrowgauge.cluster.scaling_world import WorldFailed
from narrowgauge.cluster.script import MARK, Job
from narrowgauge.cluster.site import Site, load_site, site_names
from narrowgauge.cluster.slurm import slurm_script
from narrowgauge.cluster.torchrun import torchrun_script

__all__ = [
    "MARK",
    "Job",
    "Scaling",
    "Site",
    "WorldFailed",
    "as_json",
    "examine",
    "load_site",
    "measure",
    "print_items",
    "print_plan",
    "print_scaling",
    "read_sizes",
    "scaling",
    "site_names",
    "slurm_script",
    "torchrun_script",
]

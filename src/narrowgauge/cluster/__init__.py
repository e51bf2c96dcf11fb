"""Where does it run, and at what cost?

The names below are imported when they are first used (`lazy`): the doctor works where torch does not import.
"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.cluster.launch.job_script import MARK, Job
    from narrowgauge.cluster.launch.site import Site, load_site, site_names
    from narrowgauge.cluster.launch.slurm import slurm_script
    from narrowgauge.cluster.launch.torchrun import torchrun_script
    from narrowgauge.cluster.plan.cluster_spec import Cluster, cluster_names, load_cluster
    from narrowgauge.cluster.plan.plan import Plan, make_plan, tokens_of
    from narrowgauge.cluster.plan.plan_text import print_plan
    from narrowgauge.cluster.plan.price import Price, parse_price
    from narrowgauge.cluster.scaling.local_launch import WorldFailed
    from narrowgauge.cluster.scaling.scaling import Scaling, read_sizes
    from narrowgauge.cluster.scaling.table import print_scaling
    from narrowgauge.cluster.scaling.worker import measure

__all__ = [
    "MARK",
    "Cluster",
    "Job",
    "Plan",
    "Price",
    "Scaling",
    "Site",
    "WorldFailed",
    "cluster_names",
    "load_cluster",
    "load_site",
    "make_plan",
    "measure",
    "parse_price",
    "print_plan",
    "print_scaling",
    "read_sizes",
    "site_names",
    "slurm_script",
    "tokens_of",
    "torchrun_script",
]

__getattr__ = import_on_use(
    __name__,
    {
        "launch.job_script": ("MARK", "Job"),
        "launch.site": ("Site", "load_site", "site_names"),
        "launch.slurm": ("slurm_script",),
        "launch.torchrun": ("torchrun_script",),
        "plan.cluster_spec": ("Cluster", "cluster_names", "load_cluster"),
        "plan.plan": ("Plan", "make_plan", "tokens_of"),
        "plan.plan_text": ("print_plan",),
        "plan.price": ("Price", "parse_price"),
        "scaling.local_launch": ("WorldFailed",),
        "scaling.scaling": ("Scaling", "read_sizes"),
        "scaling.table": ("print_scaling",),
        "scaling.worker": ("measure",),
    },
)

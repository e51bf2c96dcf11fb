"""Where does it run, and at what cost?"""

from narrowgauge.cluster.doctor.doctor import as_json, examine, print_items
from narrowgauge.cluster.launch.job_script import MARK, Job
from narrowgauge.cluster.launch.site import Site, load_site, site_names
from narrowgauge.cluster.launch.slurm import slurm_script
from narrowgauge.cluster.launch.torchrun import torchrun_script
from narrowgauge.cluster.plan.cluster_spec import Cluster, cluster_names, load_cluster
from narrowgauge.cluster.plan.plan import Plan, make_plan, tokens_of
from narrowgauge.cluster.plan.plan import as_json as plan_as_json
from narrowgauge.cluster.plan.plan_text import print_plan
from narrowgauge.cluster.plan.price import Price, parse_price
from narrowgauge.cluster.scaling.local_launch import WorldFailed
from narrowgauge.cluster.scaling.scaling import Scaling, read_sizes, scaling
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
    "as_json",
    "cluster_names",
    "examine",
    "load_cluster",
    "load_site",
    "make_plan",
    "measure",
    "parse_price",
    "plan_as_json",
    "print_items",
    "print_plan",
    "print_scaling",
    "read_sizes",
    "scaling",
    "site_names",
    "slurm_script",
    "tokens_of",
    "torchrun_script",
]

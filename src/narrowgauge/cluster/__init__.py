"""Plan a run, start it on a cluster, measure its scaling and check a machine.

The names below are imported on first use (`lazy`): the doctor must work where torch cannot be imported.
"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.cluster.launch.job_script import MARK as MARK
    from narrowgauge.cluster.launch.job_script import Job as Job
    from narrowgauge.cluster.launch.job_script import emulation_note as emulation_note
    from narrowgauge.cluster.launch.job_script import job_script as job_script
    from narrowgauge.cluster.launch.job_script import queued as queued
    from narrowgauge.cluster.launch.site import Site as Site
    from narrowgauge.cluster.launch.site import load_site as load_site
    from narrowgauge.cluster.launch.site import site_names as site_names
    from narrowgauge.cluster.plan.cluster_spec import Cluster as Cluster
    from narrowgauge.cluster.plan.cluster_spec import cluster_name as cluster_name
    from narrowgauge.cluster.plan.cluster_spec import cluster_names as cluster_names
    from narrowgauge.cluster.plan.cluster_spec import load_cluster as load_cluster
    from narrowgauge.cluster.plan.plan import make_plan as make_plan
    from narrowgauge.cluster.plan.plan import tokens_of as tokens_of
    from narrowgauge.cluster.plan.plan_text import print_plan as print_plan
    from narrowgauge.cluster.plan.price import Price as Price
    from narrowgauge.cluster.plan.price import parse_price as parse_price
    from narrowgauge.cluster.scaling.scaling import read_sizes as read_sizes
    from narrowgauge.cluster.scaling.table import print_scaling as print_scaling
    from narrowgauge.cluster.scaling.worker import measure as measure
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

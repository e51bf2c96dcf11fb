"""A step counted for the device of a cluster (`bench.count`): what this program's own path costs there.

It is counted where it can be: on one GPU that Triton compiles for, where Triton is installed here to declare
the kernels, and where torch does not compile the step, for which it makes kernels of its own. The speeds are
an H200's, measured, and those of another GPU in the proportion of the two data sheets.
"""

from narrowgauge.bench.count import H200, Speeds, WholeCount, count_whole
from narrowgauge.cluster.plan.cluster_spec import Cluster, load_cluster
from narrowgauge.distributed import ParallelDims
from narrowgauge.kernels.dispatch import is_triton_installed
from narrowgauge.training import Config

_KINDS = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "fp4": "fp4"}  # those of an H200: as FP8


def counted_step(config: Config, parallel_dims: ParallelDims, cluster: Cluster) -> WholeCount | None:
    """The count of a step; None where it cannot be counted."""
    is_known = cluster.facts.is_gpu and cluster.facts.has_triton and "bf16" in cluster.peak
    if parallel_dims.size > 1 or config.training.compile or not (is_known and is_triton_installed()):
        return None
    return count_whole(config, cluster.facts, speeds_of(cluster))


def speeds_of(cluster: Cluster) -> Speeds:
    """The speeds of a cluster's device."""
    here = load_cluster("h200")
    if cluster.device == here.device:
        return H200
    products = {
        kind: cluster.speed(f) / here.speed(f if f in here.peak else "fp8")
        for kind, f in _KINDS.items()
        if f in cluster.peak
    }
    memory = cluster.memory_bandwidth / here.memory_bandwidth
    words = f"an H200's, in the proportion of data sheets to {cluster.device or cluster.title}"
    return H200.scaled(words, memory, products)

"""A step counted for the device of a cluster (`simulate.count`): what this program's own path costs there.

The count is of one process that has all of the model, and a cluster's devices share what it has. It is of
the code that runs on the device: of kernels where Triton compiles for it, of torch's operations elsewhere. It
does not depend on whether this machine has Triton.

    at best     each operation at the ceilings of the cluster's file: matmuls at the speed of large ones,
                bytes at the memory's bandwidth, instructions at the rate of the fp32 lanes
    expected    the same operations at the speeds that whole steps of plain torch reached on an H200;
                for another GPU, in proportion to the two data sheets

No expected speed exceeds a ceiling (`Speeds.within`), so the best is the floor of the same count.
"""

import math
from dataclasses import replace

from narrowgauge.distributed import ParallelDims
from narrowgauge.system.devices import Device
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster, load_cluster
from narrowgauge.trainer.simulate import H200, Speeds, WholeCount, count_whole
from narrowgauge.trainer.training import Config

#: The H200 format that stands for each kind of matmul.
_KINDS = {"bf16": "bf16", "fp32": "fp32", "fp8": "fp8", "mxfp8": "fp8", "fp4": "fp8"}
_PLAIN = Device(maker="nvidia", capability=(7, 0))  # stands for CPUs and unknown devices: no kernels


def counted_step(config: Config, parallel_dims: ParallelDims, cluster: Cluster) -> WholeCount:
    """The count of a step of one process. It computes the micro-batches of all processes that share experts.

    These make the operands of an expert's weights once, for all of their micro-batches together.
    """
    t = config.training
    together = {"compile": False, "micro_batch_size": t.micro_batch_size * parallel_dims.expert}
    alone = {"training": t.model_copy(update=together), "parallel": type(config.parallel)()}
    facts = cluster.facts if cluster.facts.is_gpu else _PLAIN
    compute = config.spec.recipe.compute
    speeds = replace(speeds_of(cluster, compute), lanes_per_s=_lane_rate(cluster))
    return count_whole(config.model_copy(update=alone), facts, speeds, ceilings_of(cluster, compute))


def format_of(kind: str, cluster: Cluster, compute: str) -> str:
    """The cluster's format that computes a kind of matmul of `simulate.operations`."""
    wide = cluster.format_for(compute)
    if kind.startswith("attention") or kind == "bf16":  # 16 bits
        return wide
    if kind == "fp32":
        return cluster.format_for("fp32")
    fp8 = "fp8" if "fp8" in cluster.peak else wide
    return "fp4" if kind == "fp4" and "fp4" in cluster.peak else fp8


def ceilings_of(cluster: Cluster, compute: str) -> Speeds:
    """The speeds that nothing exceeds: from the cluster's file, and no time for a launch."""
    rates = {kind: cluster.speed(format_of(kind, cluster, compute)) for kind in H200.flops_per_s}
    return Speeds("ceilings", cluster.memory_bandwidth, rates, _lane_rate(cluster), 0.0)


def speeds_of(cluster: Cluster, compute: str = "bf16") -> Speeds:
    """The speeds of a cluster's device, for a recipe that computes in a format."""
    here = load_cluster("h200")
    products = {
        kind: cluster.speed(format_of(kind, cluster, compute)) / here.speed(of_h200)
        for kind, of_h200 in _KINDS.items()
    }
    words = "an H200's, measured"
    if cluster.device != here.device:
        words = f"an H200's, in the proportion of data sheets to {cluster.device or cluster.title}"
    memory = cluster.memory_bandwidth / here.memory_bandwidth
    return H200.scaled(words, memory, products)


def _lane_rate(cluster: Cluster) -> float:
    """Instructions/s of a GPU's fp32 lanes; of other devices none were counted."""
    return cluster.lane_rate if cluster.has_kernels else math.inf

"""Estimates the time of a step on a cluster: at best, and the share of it that a run is expected to reach.

Both come from one count of the step (`simulate.count`): what this program's own path costs on the device of
the cluster. The count is of one process that has all of the model. It is of the code that runs on the device:
of kernels where Triton compiles for it, of torch's operations elsewhere, without torch's compiler. It does
not depend on whether this machine has Triton.

    at best     each operation at the ceilings of the cluster's file: matmuls at the speed of large ones,
                bytes at the memory's bandwidth, instructions at the rate of the fp32 lanes
    expected    the same operations at the speeds that whole steps of plain torch reached on an H200;
                for another GPU, in proportion to the two data sheets

No expected speed exceeds a ceiling (`Speeds.within`), so the best is the floor of the same count. Its causes:

    matmuls     operations of each format / attainable speed of large matmuls; includes attention
    casts       operands made for the matmuls, native or emulated, by the path that this recipe takes on this
                device: bytes or instructions of its kernels, bytes of torch's operations where it has none
    passes      bytes of everything else that is computed / memory bandwidth
    update      bytes of clipping and the update / memory bandwidth; of several devices, for a device's state
    copies      state in the host's memory, read and written / the host's link; gradients for each micro-batch
    links       bytes sent in a ring of processes / the slower of the links that the ring passes

The devices share what one process with all of the model computes. Communication of weights and gradients
overlaps with the computation and costs only the excess over it; communication of activations does not
overlap. A pipeline of P processes and m micro-batches waits (P - 1) / (m x chunks) of its time.

Where a step is not counted for the device, as on several, the expectation is the share of the best that
others measured. Each machine's file lists such runs with their sources ([[measured]]), each with the speed
that `plan` calls the best for its settings. A plan takes the share of the nearest run: the distance is the
difference in devices and in parameters, in factors of two, plus one if the matmuls had another format. Among
equally near runs it takes the geometric mean, and reports the least and the most. Those runs are of other
programs: the share shows what is usual on the machine, with small and odd shapes, the host and loaded links.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import ATTENTION_PRODUCTS, Backend, Recipe, choose_backend
from narrowgauge.system.devices import Device
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster, MeasuredRun, load_cluster
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.simulate import H200, Speeds, StepEstimate, WholeCount, count_whole
from narrowgauge.trainer.training import Config

_PLAIN = Device(maker="nvidia", capability=(7, 0))  # stands for CPUs and unknown devices: no kernels


@dataclass(frozen=True)
class Volume:
    """Bytes that a device sends in a step for one purpose, in one group of ranks."""

    purpose: str  # the tag of the communication
    ranks: int  # of the group
    inside: int  # bytes over links inside a node
    between: int  # bytes over links between nodes
    seconds: float  # at the speed of the links


class Causes(NamedTuple):
    """The seconds of a step by cause."""

    products: float  # seconds of matmuls, including attention
    casts: float  # of making their operands, and of scaling emulated results
    passes: float  # of everything else that is computed
    update: float  # of the optimizer
    copies: float  # of copying state between the host's memory and the device's
    waiting: float  # for links, without the overlapping part
    bubble: float  # of waiting in a pipeline


@dataclass(frozen=True)
class Expectation:
    """The expected share of the best speed."""

    share: float
    least: float  # of the nearest measured runs; the share itself if there is none
    most: float
    runs: tuple[MeasuredRun, ...]  # the nearest
    is_counted: bool = False  # whether the share comes from the count of the step, else from the runs


@dataclass(frozen=True)
class Estimate:
    """A step on a cluster: seconds by cause, traffic and MFU at best, and the share that is expected."""

    causes: Causes
    volumes: tuple[Volume, ...]  # what a device sends
    tokens: int  # of a step
    mfu: float  # model FLOPs utilisation, relative to the peak of the matmuls' formats
    formats: tuple[str, ...]  # of the linear layers' matmuls, the most frequent first
    attention: dict[str, str]  # for a narrow attention, the casts of both operands of each product, in words
    backend: Backend  # whether the recipe is native on the device, and why
    count: WholeCount  # the step of one process that the rest follows from
    expected: Expectation | None  # None without a count for the device and without measured runs

    @property
    def seconds(self) -> float:
        """Seconds of a step at best."""
        return sum(self.causes)

    @property
    def seconds_expected(self) -> float:
        """Expected seconds of a step; those at best if nothing else is known."""
        return self.seconds / (1.0 if self.expected is None else self.expected.share)


def estimate(
    config: Config,
    parallel_dims: ParallelDims,
    cluster: Cluster,
    step: StepEstimate,
    count: WholeCount | None = None,
) -> Estimate:
    """Estimate the time of a step from its memory and traffic.

    `count` is that of another layout without expert parallelism, which is the same; None to count. Native
    matmuls that the configuration requires and the device lacks are a `UserError`.
    """
    t, recipe = config.training, config.spec.recipe
    tokens = t.batch_size * config.data.sequence_length
    backend = choose_backend(recipe, cluster.facts, config.spec.backend)
    count = count or counted_step(config, parallel_dims, cluster)
    of = count.best.of_micro_batches
    products, casts = of("product_seconds") + of("attention_seconds"), of("cast_seconds")
    passes = of("seconds") - products - casts
    products, casts, passes = (x / parallel_dims.size for x in (products, casts, passes))
    volumes = tuple(_volume(*key, size, cluster) for key, size in sorted(step.sent.items()) if size >= 2**10)
    busy = products + casts + passes
    overlapped = sum(v.seconds for v in volumes if v.purpose in ("gather", "reduce"))
    waiting = max(0.0, overlapped - busy) + sum(v.seconds for v in volumes) - overlapped
    micro_batches = t.batch_size // (parallel_dims.data * t.micro_batch_size)
    bubble = busy * (parallel_dims.pipeline - 1) / (micro_batches * parallel_dims.chunks)
    update = count.best.update.seconds * step.memory.state / count.state_bytes
    host = step.memory.host
    copied = sum(host.values()) + micro_batches * host.get("gradients", 0)
    copies = 2 * copied / cluster.host
    causes = Causes(products, casts, passes, update, copies, waiting, bubble)
    used = flops_per_token(config.spec.model, config.data.sequence_length) * tokens / sum(causes)
    formats, peak = _formats(count, cluster, recipe.compute)
    mfu, attention = used / parallel_dims.size / peak, _products_of_attention(recipe)
    expected = expectation(cluster.measured, parallel_dims.size, step.memory.parameters, formats[0])
    if cluster.facts.is_gpu and parallel_dims.size == 1 and not t.compile:
        share = sum(causes) / (count.seconds + causes.copies)  # a count leaves out the copies
        expected = expected or Expectation(share, share, share, ())
        expected = replace(expected, share=share, is_counted=True)
    return Estimate(causes, volumes, tokens, mfu, formats, attention, backend, count, expected)


def _formats(count: WholeCount, cluster: Cluster, compute: str) -> tuple[tuple[str, ...], float]:
    """The formats of the linear layers' matmuls, most first, and the mean peak of all matmuls.

    An emulated matmul counts as one in `compute`, with its peak, even if it takes a detour through fp32.
    """
    wide = cluster.peak[cluster.format_of("bf16", compute)]
    of_format: dict[str, float] = {}
    seconds = 0.0
    for kind, flops in count.flops.items():
        name = cluster.format_of(kind, compute)
        seconds += flops / max(wide, cluster.peak[name])
        if not kind.startswith("attention"):
            of_format[name] = of_format.get(name, 0.0) + flops
    formats = tuple(sorted(of_format, key=lambda name: -of_format[name]))
    return formats, sum(count.flops.values()) / seconds


def _products_of_attention(recipe: Recipe) -> dict[str, str]:
    """The casts of both operands of each product of a narrow attention."""

    def name(place: str) -> str:
        cast = recipe.attention.get(place)
        return recipe.compute if cast is None else cast.name

    products = ATTENTION_PRODUCTS.items() if recipe.narrows_attention else ()
    return {product: f"{name(a)} x {name(b)}" for product, (a, b) in products}


def _volume(purpose: str, ranks: tuple[int, ...], size: int, cluster: Cluster) -> Volume:
    """Traffic of a ring of ranks: each node sends to the next as much as each rank to its neighbour."""
    nodes = len({rank // cluster.devices_per_node for rank in ranks})
    per_node = len(ranks) // nodes
    if nodes == 1:
        return Volume(purpose, len(ranks), size, 0, size / cluster.inside)
    between = size // max(1, per_node)
    speed = min(cluster.between * max(1, per_node), cluster.inside) if per_node > 1 else cluster.between
    return Volume(purpose, len(ranks), size - between, between, size / speed)


def counted_step(config: Config, parallel_dims: ParallelDims, cluster: Cluster) -> WholeCount:
    """The count of a step of one process. It computes the micro-batches of all processes that share experts.

    These make the operands of an expert's weights once, for all of their micro-batches together.
    """
    t = config.training
    together = {"compile": False, "micro_batch_size": t.micro_batch_size * parallel_dims.expert}
    alone = {"training": t.model_copy(update=together), "parallel": type(config.parallel)()}
    facts = cluster.facts if cluster.facts.is_gpu else _PLAIN
    compute = config.spec.recipe.compute
    rates = {kind: cluster.speed(cluster.format_of(kind, compute)) for kind in H200.flops_per_s}
    ceilings = Speeds("ceilings", cluster.memory_bandwidth, rates, cluster.lane_rate, kernel_s=0.0)
    speeds = replace(speeds_of(cluster, compute), lanes_per_s=cluster.lane_rate)
    return count_whole(config.model_copy(update=alone), facts, speeds, ceilings)


def speeds_of(cluster: Cluster, compute: str = "bf16") -> Speeds:
    """The speeds of a cluster's device for a compute format, at an H200's share of the data sheet."""
    here = load_cluster("h200")
    rates = {
        kind: rate
        * (cluster.speed(cluster.format_of(kind, compute)) / here.speed(here.format_of(kind, "bf16")))
        for kind, rate in H200.flops_per_s.items()
    }
    words = "an H200's, measured"
    if cluster.device != here.device:
        words = f"an H200's, in the proportion of data sheets to {cluster.device or cluster.title}"
    memory = H200.bytes_per_s * (cluster.memory_bandwidth / here.memory_bandwidth)
    return replace(H200, words=words, bytes_per_s=memory, flops_per_s=rates)


def expectation(
    measured: Sequence[MeasuredRun], devices: int, parameters: int, format: str
) -> Expectation | None:
    """The expected share for a plan; None if no run was measured.

    `format` is that of most of its matmuls.
    """
    if not measured:
        return None

    def distance(run: MeasuredRun) -> float:
        apart = abs(math.log2(run.devices / devices)) + abs(math.log2(run.parameters / parameters))
        return round(apart + (run.format != format), 6)

    least_apart = min(distance(run) for run in measured)
    nearest = tuple(run for run in measured if distance(run) == least_apart)
    shares = [min(1.0, run.share) for run in nearest]  # nothing is expected to exceed the best
    return Expectation(math.prod(shares) ** (1 / len(shares)), min(shares), max(shares), nearest)

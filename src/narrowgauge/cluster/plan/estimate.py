"""Estimates the time of a step on a cluster at best, from what the step computes and moves.

    products    operations of each format / what large products of it attain; recomputed ones twice
    attention   the same, as it is computed (`attention_cost.py`)
    casts       operands made for the products, native or emulated (`cast_price.py`)
    passes      bytes that norms, activations and the loss read and write, each fused / memory bandwidth
    update      bytes of the state, read and written / memory bandwidth
    copies      state in the host's memory, read and written / the host's link; gradients for each micro-batch
    links       bytes sent in a ring of processes / the slower of the links that the ring passes

What is computed and moved is counted as for `bench` (`bench/work.py`). Communication of weights and gradients
overlaps with the computation and costs only the excess over it; communication of activations does not
overlap. A pipeline of P processes and m micro-batches waits (P - 1) / (m x chunks) of its time.

It is a lower bound for this program. What runs reach of it was measured by others (`expect.py`).
"""

from dataclasses import dataclass

from narrowgauge.bench.work import work_of_passes
from narrowgauge.cluster.plan.attention_cost import AttentionCost, attention_cost
from narrowgauge.cluster.plan.cast_price import cast_seconds, scaling_seconds
from narrowgauge.cluster.plan.cluster_spec import Cluster
from narrowgauge.distributed import ParallelDims
from narrowgauge.models import flops_per_token
from narrowgauge.recipes import Backend, choose_backend
from narrowgauge.training import Config, StepEstimate


@dataclass(frozen=True)
class Volume:
    """Bytes that a device sends in a step for one purpose, in one group of ranks.

    Attributes:
        purpose: the tag of the communication.
        ranks: the number of ranks of the group.
        inside: bytes over links inside a node.
        between: bytes over links between nodes.
        seconds: the time at the speed of the links.
    """

    purpose: str
    ranks: int
    inside: int
    between: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The estimate of a step on a cluster: seconds by cause, traffic and MFU.

    Attributes:
        products: seconds of products, attention among them.
        casts: seconds of making their operands, of scaling emulated results, and of an emulated attention.
        passes: seconds of everything else that is computed.
        update: seconds of the optimizer.
        copies: seconds of copying state between the host's memory and the device's.
        waiting: seconds of waiting for links, without the overlapping part.
        bubble: seconds of waiting in a pipeline.
        volumes: what a device sends.
        tokens: tokens of a step.
        mfu: model FLOPs utilisation, of the peak in the recipe's wide format.
        formats: the formats of the linear layers' products, that of most of them first.
        attention: the products of attention.
        backend: whether the recipe is native on the device, and why.
    """

    products: float
    casts: float
    passes: float
    update: float
    copies: float
    waiting: float
    bubble: float
    volumes: tuple[Volume, ...]
    tokens: int
    mfu: float
    formats: tuple[str, ...]
    attention: AttentionCost
    backend: Backend

    @property
    def format(self) -> str:
        """The format of most products."""
        return self.formats[0]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return (
            self.products + self.casts + self.passes + self.update + self.copies + self.waiting + self.bubble
        )


def estimate(config: Config, parallel_dims: ParallelDims, cluster: Cluster, step: StepEstimate) -> Estimate:
    """Estimate the time of a step from its memory and traffic.

    Raises:
        UserError: the configuration asks for native products that the device does not have.
    """
    t, recipe = config.training, config.spec.recipe
    tokens = t.batch_size * config.data.sequence_length
    backend = choose_backend(recipe, cluster.facts, config.spec.backend)
    is_native = backend.name == "native"
    formats, attention, seconds = _computation(config, parallel_dims, cluster, is_native)
    products, casts, passes = seconds
    volumes = tuple(_volume(*key, size, cluster) for key, size in sorted(step.sent.items()) if size >= 2**10)
    busy = products + casts + passes
    overlapped = sum(v.seconds for v in volumes if v.purpose in ("gather", "reduce"))
    waiting = max(0.0, overlapped - busy) + sum(v.seconds for v in volumes) - overlapped
    micro_batches = t.batch_size // (parallel_dims.data * t.micro_batch_size)
    bubble = busy * (parallel_dims.pipeline - 1) / (micro_batches * parallel_dims.chunks)
    state = sum(step.memory.device[name] for name in ("weights", "master", "gradients", "m", "v"))
    update = 2 * state / cluster.memory_bandwidth
    host = step.memory.host
    copied = sum(host.values()) + micro_batches * host.get("gradients", 0)
    copies = 2 * copied / cluster.host
    total = busy + waiting + bubble + update + copies
    used = flops_per_token(config.spec.model, config.data.sequence_length) * tokens / total
    mfu = used / parallel_dims.size / cluster.peak[cluster.format_for(recipe.compute)]
    return Estimate(
        products,
        casts,
        passes,
        update,
        copies,
        waiting,
        bubble,
        volumes,
        tokens,
        mfu,
        formats,
        attention,
        backend,
    )


def _computation(
    config: Config, parallel_dims: ParallelDims, cluster: Cluster, native: bool
) -> tuple[tuple[str, ...], AttentionCost, tuple[float, float, float]]:
    """(formats of products, attention, seconds of products, casts and passes) of one device in a step."""
    recipe, data = config.spec.recipe, config.data
    # A process sees the tokens of its part of a sequence; attention is of whole sequences.
    tokens = max(1, data.sequence_length // parallel_dims.context)
    part = config.model_copy(update={"data": data.model_copy(update={"sequence_length": tokens})})
    work = work_of_passes(part, native, parallel_dims.expert)
    devices = parallel_dims.size // parallel_dims.context
    speeds = _speeds(config, cluster)
    flops = dict.fromkeys(speeds, 0)
    for gemm, times in work.gemms.items():
        flops[gemm.kind] += gemm.flops * times
    products = sum(flops[kind] / cluster.speed(format) for kind, format in speeds.items())
    attention = attention_cost(config, work)
    products += attention.product_seconds(cluster, recipe.compute) / parallel_dims.context
    casts = 0.0
    for operand, elements in work.operands.items():
        casts += cast_seconds(operand, elements, native, cluster, recipe.compute)
    casts += scaling_seconds(work.scaled_results, cluster)
    casts += attention.moved / parallel_dims.context / cluster.memory_bandwidth
    passes = (work.moved["norms and the rest"] + work.moved["loss"]) / cluster.memory_bandwidth
    kinds = sorted((kind for kind in flops if flops[kind]), key=lambda kind: -flops[kind])
    formats = tuple(dict.fromkeys(speeds[kind] for kind in kinds))
    return formats, attention, (products / devices, casts / devices, passes / devices)


def _speeds(config: Config, cluster: Cluster) -> dict[str, str]:
    """The format of the cluster that multiplies each kind of product of `bench.work`."""
    wide = {kind: cluster.format_for(kind) for kind in ("bf16", "fp16", "fp32")}
    fp8 = "fp8" if "fp8" in cluster.peak else wide[config.spec.recipe.compute]
    return wide | {"fp8": fp8, "mxfp8": fp8, "fp4": "fp4" if "fp4" in cluster.peak else fp8}


def _volume(purpose: str, ranks: tuple[int, ...], size: int, cluster: Cluster) -> Volume:
    """Traffic of a ring of ranks: each node sends to the next as much as each rank to its neighbour."""
    nodes = len({rank // cluster.devices_per_node for rank in ranks})
    per_node = len(ranks) // nodes
    if nodes == 1:
        return Volume(purpose, len(ranks), size, 0, size / cluster.inside)
    between = size // max(1, per_node)
    speed = min(cluster.between * max(1, per_node), cluster.inside) if per_node > 1 else cluster.between
    return Volume(purpose, len(ranks), size - between, between, size / speed)

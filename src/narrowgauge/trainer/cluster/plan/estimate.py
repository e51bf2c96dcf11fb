"""Estimates the time of a step on a cluster at best, from a count of the step (`counted.py`).

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

It is a lower bound for this program, as it runs without torch's compiler. What runs reach of it was measured
by others (`expect.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import ATTENTION_PRODUCTS, Backend, Recipe, choose_backend
from narrowgauge.trainer.cluster.plan.cluster_spec import Cluster
from narrowgauge.trainer.cluster.plan.counted import counted_step, format_of
from narrowgauge.trainer.models import flops_per_token
from narrowgauge.trainer.simulate import StepEstimate, WholeCount
from narrowgauge.trainer.training import Config


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
class Estimate:
    """The estimate of a step on a cluster: seconds by cause, traffic and MFU."""

    causes: Causes
    volumes: tuple[Volume, ...]  # what a device sends
    tokens: int  # of a step
    mfu: float  # model FLOPs utilisation, relative to the peak of the matmuls' formats
    formats: tuple[str, ...]  # of the linear layers' matmuls, the most frequent first
    attention: dict[str, str]  # for a narrow attention, the casts of both operands of each product, in words
    backend: Backend  # whether the recipe is native on the device, and why
    count: WholeCount  # the step of one process that the rest follows from

    @property
    def format(self) -> str:
        """The format of most matmuls."""
        return self.formats[0]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.causes)


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
    products, casts, passes = (seconds / parallel_dims.size for seconds in _computation(count))
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
    mfu = used / parallel_dims.size / peak
    return Estimate(
        causes,
        volumes,
        tokens,
        mfu,
        formats,
        _products_of_attention(recipe) if recipe.narrows_attention else {},
        backend,
        count,
    )


def _computation(count: WholeCount) -> tuple[float, float, float]:
    """Seconds of the matmuls, the casts and the passes of all micro-batches at best."""
    of = count.best.of_micro_batches
    products, casts = of("product_seconds") + of("attention_seconds"), of("cast_seconds")
    return products, casts, of("seconds") - products - casts


def _formats(count: WholeCount, cluster: Cluster, compute: str) -> tuple[tuple[str, ...], float]:
    """The formats of the linear layers' matmuls, most first, and the mean peak of all matmuls.

    An emulated matmul counts as one in `compute`, with its peak, even if it takes a detour through fp32.
    """
    wide = cluster.peak[cluster.format_for(compute)]
    of_format: dict[str, float] = {}
    seconds = 0.0
    for kind, flops in count.flops.items():
        name = format_of(kind, cluster, compute)
        seconds += flops / max(wide, cluster.peak[name])
        if not kind.startswith("attention"):
            of_format[name] = of_format.get(name, 0.0) + flops
    formats = tuple(sorted(of_format, key=lambda name: -of_format[name]))
    return formats, sum(count.flops.values()) / seconds


def _products_of_attention(recipe: Recipe) -> dict[str, str]:
    """The casts of both operands of each product."""

    def name(place: str) -> str:
        cast = recipe.attention.get(place)
        return recipe.compute if cast is None else cast.name

    return {product: f"{name(a)} x {name(b)}" for product, (a, b) in ATTENTION_PRODUCTS.items()}


def _volume(purpose: str, ranks: tuple[int, ...], size: int, cluster: Cluster) -> Volume:
    """Traffic of a ring of ranks: each node sends to the next as much as each rank to its neighbour."""
    nodes = len({rank // cluster.devices_per_node for rank in ranks})
    per_node = len(ranks) // nodes
    if nodes == 1:
        return Volume(purpose, len(ranks), size, 0, size / cluster.inside)
    between = size // max(1, per_node)
    speed = min(cluster.between * max(1, per_node), cluster.inside) if per_node > 1 else cluster.between
    return Volume(purpose, len(ranks), size - between, between, size / speed)

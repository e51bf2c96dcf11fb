"""Estimates the time of a step on a cluster and the cost of a run, from peak rates and their overlap.

    products    operations of each format / what the device attains in it; recomputed ones twice
    passes      bytes that everything else reads and writes, unfused / the device's memory bandwidth
    links       bytes sent in a ring of processes / the slower of the links that the ring passes
    update      bytes of the state, read and written / memory bandwidth, or the host's link

Communication of weights and gradients overlaps with the computation and costs only the excess over it;
communication of activations does not overlap. A pipeline of P processes and m micro-batches waits
(P - 1) / (m x chunks) of its time. The result is a lower bound: small kernels and waiting for other processes
make a real run slower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.cluster.plan.cluster_spec import Cluster
from narrowgauge.distributed import ParallelDims
from narrowgauge.models import Transformer, flops_per_token, model_config
from narrowgauge.recipes import Recipe
from narrowgauge.torch_compat import TorchDispatchMode, tree_iter
from narrowgauge.training import Config, StepEstimate

# Operations whose bytes are not counted: products are estimated separately.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "scaled_dot_product")


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
    """The estimate of a step on a cluster: seconds by cause, traffic and MFU."""

    products: float
    passes: float
    update: float
    waiting: float  # for links, without the overlapping part
    bubble: float  # of the pipeline
    volumes: tuple[Volume, ...]
    tokens: int
    mfu: float
    format: str  # of most products

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.products + self.passes + self.update + self.waiting + self.bubble


def estimate(config: Config, parallel_dims: ParallelDims, cluster: Cluster, step: StepEstimate) -> Estimate:
    """Estimate the time of a step from its memory and traffic."""
    model, t, data = config.spec.model, config.training, config.data
    tokens = t.batch_size * data.sequence_length
    per_device = tokens / parallel_dims.size
    format, products = _products(config, cluster)
    passes = per_device * _bytes_per_token(config) / cluster.memory_bandwidth
    volumes = tuple(_volume(*key, size, cluster) for key, size in sorted(step.sent.items()) if size >= 2**10)
    busy = per_device * products + passes
    overlapped = sum(v.seconds for v in volumes if v.purpose in ("gather", "reduce"))
    waiting = max(0.0, overlapped - busy) + sum(v.seconds for v in volumes) - overlapped
    micro_batches = t.batch_size // (parallel_dims.data * t.micro_batch_size)
    bubble = busy * (parallel_dims.pipeline - 1) / (micro_batches * parallel_dims.chunks)
    state = sum(step.memory.device[name] for name in ("weights", "master", "gradients", "m", "v"))
    update = 2 * state / cluster.memory_bandwidth + 2 * sum(step.memory.host.values()) / cluster.host
    total = busy + waiting + bubble + update
    compute = cluster.format_for(16, config.spec.recipe.compute)
    used = flops_per_token(model, data.sequence_length) * tokens / total
    mfu = used / parallel_dims.size / cluster.peak[compute]
    return Estimate(per_device * products, passes, update, waiting, bubble, volumes, tokens, mfu, format)


def _products(config: Config, cluster: Cluster) -> tuple[str, float]:
    """(format of most products, seconds of all products for one token on one device)."""
    model, recipe = config.spec.model, config.spec.recipe
    T, t = config.data.sequence_length, config.training
    head = 6 * model.vocab_size * model.dim
    attention = 12 * model.layers * model.heads * model.head_dim * T
    linear = flops_per_token(model, T) - head - attention
    repeats = 4 / 3 if t.recompute and t.recompute_every == 1 else 1 + (t.recompute / 3 / t.recompute_every)
    format = cluster.format_for(_bits(recipe), recipe.compute)
    wide = cluster.format_for(16, recipe.compute)
    narrow = repeats * linear / cluster.speed(format)
    # The masked half of attention is not computed, but the convention of MFU counts it.
    return format, narrow + (head + repeats * attention / 2) / cluster.speed(wide)


def _bits(recipe: Recipe) -> int:
    """Bits of the widest operand of most products, which decides their format."""
    return max(16 if not recipe.is_narrow else c.element.bits for c in recipe.casts.values())


def _bytes_per_token(config: Config) -> float:
    """Bytes that all operations except products read and write for a token, forward and backward.

    The count runs the model with one block and with two on meta tensors, in high precision; a narrow recipe
    also reads each operand of a product once more, and writes its codes and scales.
    """
    T = min(config.data.sequence_length, 256)
    one, two = (_bytes_moved(config, layers, T) for layers in (1, 2))
    model, recipe = config.spec.model, config.spec.recipe
    layers = model.layers * (4 / 3 if config.training.recompute else 1)
    casts = 0.0
    if recipe.is_narrow:
        width = 2 * model.dim + (model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.ffn_dim
        stored = max(c.bits_per_element for c in recipe.casts.values()) / 8
        casts = 2 * width * (2 + 2 + stored) * model.layers
    return (two - one) / T * layers + max(0.0, 2 * one - two) / T + casts


def _bytes_moved(config: Config, layers: int, T: int) -> int:
    section = config.model.model_dump(exclude_none=True, exclude={"weights"})
    with torch.device("meta"):
        model = Transformer(model_config(**section | {"layers": layers}), torch.bfloat16).to(torch.bfloat16)
    x_BT = torch.zeros(1, T, dtype=torch.long, device="meta")
    with _ByteCounter() as counter:
        model.loss(x_BT, x_BT).backward()
    return counter.bytes


class _ByteCounter(TorchDispatchMode):
    """Counts the bytes that operations read and write, except products and views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if not name.startswith(_PRODUCTS) and not func.is_view:
            tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            # Weights and their gradients (ndim <= 2) are read once a step, not once a token.
            self.bytes += sum(x.nbytes for x in tensors if x.ndim > 2)
        return out


def _volume(purpose: str, ranks: tuple[int, ...], size: int, cluster: Cluster) -> Volume:
    """Traffic of a ring of ranks: each node sends to the next as much as each rank to its neighbour."""
    nodes = len({rank // cluster.devices_per_node for rank in ranks})
    per_node = len(ranks) // nodes
    if nodes == 1:
        return Volume(purpose, len(ranks), size, 0, size / cluster.inside)
    between = size // max(1, per_node)
    speed = min(cluster.between * max(1, per_node), cluster.inside) if per_node > 1 else cluster.between
    return Volume(purpose, len(ranks), size - between, between, size / speed)


def cost(step: Estimate, devices: int, tokens: int, price: float) -> Mapping[str, float]:
    """Days, device-hours and price of a budget of tokens."""
    days = tokens / step.tokens * step.seconds / 86400
    return {"days": days, "device-hours": days * 24 * devices, "price": days * 24 * devices * price}

"""What attention takes: a fused kernel where it is wide, the reference in pieces where a recipe narrows it.

    wide      2 products forward, 4 backward, in the wide format; the masked half is not computed
    narrow    no device has a kernel, so all scores are computed: 2 products forward, 5 backward, in fp32, and
              what passes over the scores moves, in bytes a score: `_FORWARD`, `_BACKWARD` for the softmax and
              its gradient, `_CAST` each time that p or ds is narrowed

Bytes are of plain operations, as for casts without a kernel (`cast_price.py`).
"""

from dataclasses import dataclass

from narrowgauge.bench.work import Work
from narrowgauge.cluster.plan.cluster_spec import Cluster
from narrowgauge.recipes import ATTENTION_PRODUCTS, Recipe
from narrowgauge.training import Config

_FORWARD, _BACKWARD, _CAST = 40, 104, 124


@dataclass(frozen=True)
class AttentionCost:
    """The attention of a step of all devices.

    Attributes:
        flops: operations of its products, as they are computed.
        moved: bytes that pass over the scores move; 0 for a fused kernel.
        products: for a narrow attention, the casts of both operands of each product, in words.
    """

    flops: float
    moved: float
    products: dict[str, str]

    def product_seconds(self, cluster: Cluster, compute: str) -> float:
        """Seconds of the products on one device."""
        return self.flops / cluster.speed(cluster.format_for("fp32" if self.products else compute))


def attention_cost(config: Config, work: Work) -> AttentionCost:
    """What the attention of a step takes."""
    model, t, recipe = config.spec.model, config.training, config.spec.recipe
    T = config.data.sequence_length
    forward = 2 * t.batch_size * T * T * model.heads * model.head_dim
    again = work.attention_forward / work.attention_backward
    if not recipe.narrows_attention:
        return AttentionCost(model.layers * forward * (again + 2), 0.0, {})
    scores = model.layers * t.batch_size * model.heads * T * T
    narrow = [p for p in ("attention.p", "attention.ds") if (c := recipe.attention.get(p)) and c.is_scaled]
    moved = again * (_FORWARD + _CAST * ("attention.p" in narrow)) + _BACKWARD
    moved += _CAST * sum(1 if place == "attention.p" else 2 for place in narrow)
    return AttentionCost(model.layers * forward * 2 * (again + 2.5), scores * moved, _products(recipe))


def _products(recipe: Recipe) -> dict[str, str]:
    """The casts of both operands of each product."""

    def name(place: str) -> str:
        cast = recipe.attention.get(place)
        return recipe.compute if cast is None else cast.name

    return {product: f"{name(a)} x {name(b)}" for product, (a, b) in ATTENTION_PRODUCTS.items()}

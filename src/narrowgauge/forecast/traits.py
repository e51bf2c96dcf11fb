"""The traits of a recipe that a loss gap may depend on: its covariates in a fit.

Every trait is derived from the recipe as it resolves in a model (`recipes.resolve`), so a published scheme,
a shipped recipe and a user's own file are described alike. A linear layer has three GEMMs of equal FLOPs,
fprop, dgrad and wgrad, with two operands each. An operand is narrow if it is rounded in its place to elements
of fewer than 16 bits. One that takes the values of another place as they are, `dgrad.w = "fprop.w"`, is wide:
its GEMM runs wide, and the rounding is the other place's.
With n(g) the number of narrow operands of GEMM g, and t the share of the layers' FLOPs that stay wide,

    narrow(g)    = (1 - t) n(g) / 2            0: both operands wide, 1: both narrow in every layer
    narrow_share = mean of narrow(g) over g    the share of the operands of all GEMMs that are narrow

Blocks weigh alike, as they do in a model of equal blocks. The output head and whatever else lies outside
blocks is left out: it is wide in all published runs, and its share depends on the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, Outline, Recipe, resolve

BLOCKS = 32  # of a model whose depth is not given; a share of blocks is rounded up to whole ones
WIDE_BITS = 16
_LAYERS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")  # names that patterns of rules select


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a recipe does to the GEMMs of a model's blocks.

    Attributes:
        bits: The bits of an element in each of `recipes.GEMM_PLACES`, scales not counted.
        block: The elements under one scale in each place: 1 for a plain conversion, 0 for a row or a tensor.
        rounding: "wide", "nearest", "stochastic" or "corrected" (stochastic scales) in each place.
        hadamard: The size of the Hadamard transform of each GEMM, 0 for none.
        narrow: The share of narrow operands of each GEMM over all layers, 0 to 1.
        reuses_forward: Whether the backward pass starts from the values of the forward pass: dgrad.w and
            wgrad.x are these values, or are made from them.
        tail_share: The share of the blocks in which every GEMM is wide.
        timed: Whether a rule changes a GEMM during the run; the traits then describe the first step.
    """

    bits: Mapping[str, int]
    block: Mapping[str, int]
    rounding: Mapping[str, str]
    hadamard: Mapping[str, int]
    narrow: Mapping[str, float]
    reuses_forward: bool
    tail_share: float
    timed: bool

    @property
    def narrow_share(self) -> float:
        """The share of the operands of all GEMMs that are narrow."""
        return sum(self.narrow.values()) / len(self.narrow)

    @property
    def direction(self) -> str:
        """The passes with a narrow GEMM operand: "none", "forward", "backward" or "both"."""
        forward, backward = self.narrow["fprop"] > 0, self.narrow["dgrad"] + self.narrow["wgrad"] > 0
        return {(0, 0): "none", (1, 0): "forward", (0, 1): "backward", (1, 1): "both"}[forward, backward]


@lru_cache(maxsize=4)
def _outline(blocks: int) -> Outline:
    """A model of some equal blocks: every layer stands for its share of a block's FLOPs."""
    names = [f"blocks.{number}" for number in range(blocks)]
    layers: dict[str, list[tuple[str, int | None]]] = {"head": [("head", None)]}
    for number, block in enumerate(names):
        layers |= {f"{block}.{layer}": [(f"{block}.{layer}", number)] for layer in _LAYERS}
    return Outline(layers, dict.fromkeys(layers, (128, 128)), names)


def traits(recipe: Recipe, blocks: int = BLOCKS, tail_share: float | None = None) -> Traits:
    """The traits of a recipe in a model of `blocks` equal blocks.

    Args:
        recipe: The recipe.
        blocks: The number of blocks.
        tail_share: The share of wide blocks where it is known, as in a published run whose tail differs from
            the recipe's; None takes the blocks that the recipe keeps.
    """
    outline = _outline(blocks)
    parts = [part for name, part in resolve(recipe, outline).parts.items() if name != "head"]
    of_block = [parts[i : i + len(_LAYERS)] for i in range(0, len(parts), len(_LAYERS))]
    kept = [not any(_narrow_places(part) for part in block) for block in of_block]
    tail = sum(kept) / blocks if tail_share is None else tail_share
    inside = [p for block, is_kept in zip(of_block, kept, strict=True) if not is_kept for p in block] or parts
    share = {
        gemm: sum(sum(p.startswith(gemm) for p in _narrow_places(part)) / 2 for part in inside) / len(inside)
        for gemm in GEMMS
    }
    casts = recipe.casts
    return Traits(
        bits={place: min(cast.element.bits, WIDE_BITS) for place, cast in casts.items()},
        block={place: _block(cast) for place, cast in casts.items()},
        rounding={place: _rounding(cast) for place, cast in casts.items()},
        hadamard={gemm: casts[place].hadamard for gemm, place in zip(GEMMS, GEMM_PLACES[::2], strict=True)},
        narrow={gemm: (1 - tail) * value for gemm, value in share.items()},
        reuses_forward=_reuses(recipe.casts),
        tail_share=tail,
        timed=any(rule.is_timed and rule.casts for rule in recipe.rules),
    )


def _narrow_places(part: Recipe) -> list[str]:
    """The places of a layer whose operand is narrow in the first step."""
    return [place for place in GEMM_PLACES if part.casts[place].element.bits < WIDE_BITS]


def _block(cast: Cast) -> int:
    if not cast.is_scaled:
        return 1
    return 0 if cast.block is None else cast.block[0] * cast.block[1]


def _rounding(cast: Cast) -> str:
    if cast.element.bits >= WIDE_BITS:
        return "wide"
    if cast.correct:
        return "corrected"
    return "stochastic" if cast.is_random else "nearest"


def _reuses(casts: Mapping[str, Cast]) -> bool:
    """Whether both backward operands that the forward pass saw come from its values."""
    same = casts["dgrad.w"].of or (casts["dgrad.w"] == casts["fprop.w"] and casts["fprop.w"].ignores_axis)
    return bool(same and casts["wgrad.x"].of) and casts["fprop.x"].element.bits < WIDE_BITS

"""A recipe for qwix (JAX): a list of `QtRule`s, which select modules by regular expressions; the first wins.

qwix multiplies FP8 codes under scales of a tensor, of rows, or of n elements along the contraction. By
default a rule's backward pass reuses the values of the forward pass; `additional_qt_config` quantizes each of
the six operands separately, as a recipe does.

Also refused: MX, whose scale is rounded up in release 0.1.8 and by another rule in the source that calls
itself 0.1.8; NVFP4, which lacks a tensor scale there; and stochastic rounding, which leaves floating-point
elements as they are.

Source: qwix 0.1.8 and qwix @ aa623ac, providers/qt.py, core/{dot_general_qt,qarray,numerics}.py.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product

from narrowgauge.exchange.table import FLOAT8, OF_GEMM, Layers, Refusal, unlike
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.recipe import Recipe

VERSION = "qwix 0.1.8"
NOTES = (
    "Give rules(blocks) to qwix.QtProvider, and this to qwix.quantize_model. Inputs have to be on the "
    "left of jax.lax.dot_general, parameters on the right, as in flax's Dense and Linear.",
    "qwix divides by amax / max, where the recipe multiplies by max / amax: scales may differ in their "
    "last bit, and values near the midpoint of two codes may be rounded to the other one.",
    "Scales are in the dtype of the tensor: in bfloat16, qwix rounds them to bfloat16. In float32 they "
    "are the recipe's.",
)
# Forward: x on the left (lhs), w on the right. dlhs is dgrad, drhs is wgrad; a residual is the other operand.
_FILE = '''\
import math

import jax.numpy as jnp
from qwix import QtRule

# Modules that stay in {compute}, and blocks from both ends, where a float is a share of them, rounded up.
MODULES = {patterns}
FIRST_BLOCKS = {first}
LAST_BLOCKS = {last}


def rules(blocks, block_path="blocks/{{}}"):
    """The rules for a model of `blocks` blocks, whose module paths begin with `block_path`."""

    def count(requested):
        return requested if isinstance(requested, int) else math.ceil(round(requested * blocks, 6))

    numbers = [*range(count(FIRST_BLOCKS)), *range(blocks - count(LAST_BLOCKS), blocks)]
    wide = [*MODULES, *(block_path.format(n) + "(/.*)?" for n in numbers)]
    return [
        *(QtRule(module_path=path) for path in wide),
        QtRule(
            module_path=".*",
            op_names=("dot_general",),
            act_qtype={dtype[fprop.x]},
            weight_qtype={dtype[fprop.w]},
            bwd_qtype={bwd},{tile_size}
            additional_qt_config={{
                "use_original_residuals": True,
                "lhs_disable_channelwise_axes": {whole[fprop.x]},
                "rhs_disable_channelwise_axes": {whole[fprop.w]},
                "dlhs_grad_qtype": {dtype[dgrad.dy]},
                "dlhs_grad_disable_channelwise_axes": {whole[dgrad.dy]},
                "dlhs_tile_size": {tile[dgrad.dy]},
                "dlhs_residual_qtype": {dtype[dgrad.w]},
                "dlhs_residual_disable_channelwise_axes": {whole[dgrad.w]},
                "drhs_grad_qtype": {dtype[wgrad.dy]},
                "drhs_grad_disable_channelwise_axes": {whole[wgrad.dy]},
                "drhs_tile_size": {tile[wgrad.dy]},
                "drhs_residual_qtype": {dtype[wgrad.x]},
                "drhs_residual_disable_channelwise_axes": {whole[wgrad.x]},
            }},
        ),
    ]
'''


@cache
def _narrow(tile: int) -> list[Cast]:
    elements = product(FLOAT8, ("tensor", "row", tile))
    return [make_cast({"element": element, "block": block}) for element, block in elements]


def choices(recipe: Recipe, place: str) -> list[Cast]:
    """The casts that qwix has in a place, with the width of the block there."""
    return [make_cast(recipe.compute), *_narrow(_tile(recipe.casts[place]) or 128)]


def others(recipe: Recipe, layers: Layers, found: Sequence[Refusal]) -> list[Refusal]:
    """Combinations of casts that qwix supports one by one, but not together."""
    if found:
        return []
    tiles = {place: _tile(c) for place, c in recipe.casts.items()}
    apart = unlike("block", tiles, OF_GEMM, "qwix tiles both operands of a GEMM alike")
    if make_cast(recipe.compute) in (recipe.casts["fprop.x"], recipe.casts["fprop.w"]):
        why = "a wide operand in fprop, but qwix leaves a module alone whose weight is not quantized"
        apart.append(Refusal("fprop", "element", why))
    return apart


def write(recipe: Recipe, layers: Layers, blocks: int | None) -> tuple[Sequence[str], str]:
    """The notes and the Python file."""
    casts = recipe.casts
    dtypes = {p: f"jnp.{FLOAT8[c.element.name]}" if c.is_scaled else "None" for p, c in casts.items()}
    tiles = {place: _tile(c) for place, c in casts.items()}
    return NOTES, _FILE.format(
        patterns=[_regex(m) for m in layers.modules],
        first=layers.first_blocks,
        last=layers.last_blocks,
        compute=recipe.compute,
        bwd=dtypes["dgrad.dy" if casts["dgrad.dy"].is_scaled else "wgrad.dy"],
        tile_size=f"\n            tile_size={tiles['fprop.x']}," if tiles["fprop.x"] else "",
        dtype=dtypes,
        tile=tiles,
        whole={place: c.block is None for place, c in casts.items()},
    )


def _tile(c: Cast) -> int | None:
    return c.block[1] if c.block and c.block[1] else None


def _regex(pattern: str) -> str:
    """A regular expression of module paths for a recipe's pattern; it also matches a name's last part."""
    special = {"*": ".*", "?": ".", ".": "/"}
    made = "".join(special.get(ch, ch if ch.isalnum() or ch in "_[]-" else f"\\{ch}") for ch in pattern)
    return made if "." in pattern else f"(.*/)?{made}"

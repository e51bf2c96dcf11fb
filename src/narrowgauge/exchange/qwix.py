"""A recipe for qwix (JAX): a list of `QtRule`s, which select modules by regular expressions; the first wins.

qwix multiplies FP8 codes under scales of a tensor, of rows, or of n elements along the contraction. By
default a rule's backward pass reuses the values of the forward pass; `additional_qt_config` quantizes each of
the six operands separately, as a recipe does.

Also refused: MX, whose scale is rounded up in release 0.1.8 and by another rule in the source that calls
itself 0.1.8; NVFP4, which lacks a tensor scale there; and stochastic rounding, which leaves floating-point
elements as they are.

Source: qwix 0.1.8 and qwix @ aa623ac, providers/qt.py, core/{dot_general_qt,qarray,numerics}.py.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from narrowgauge.exchange.layers import kept
from narrowgauge.exchange.refusal import Refusal, cast_refusals, outside_products
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.places import GEMM_PLACES, GEMMS, GROUPS
from narrowgauge.recipes.recipe import Recipe

VERSION = "qwix 0.1.8"
DTYPES = {
    "e4m3": "jnp.float8_e4m3fn",
    "e5m2": "jnp.float8_e5m2",
    "e4m3fnuz": "jnp.float8_e4m3fnuz",
    "e5m2fnuz": "jnp.float8_e5m2fnuz",
}


@cache
def _said(c: Cast) -> tuple[Cast, ...]:
    """The casts that qwix has, with the width of this one's block."""
    width = c.block[1] if c.block and c.block[0] == 1 and c.block[1] else 128
    return tuple(make_cast({"element": e, "block": b}) for e in DTYPES for b in ("tensor", "row", width))


def refusals(recipe: Recipe) -> list[Refusal]:
    """What qwix cannot express of a recipe."""
    found = outside_products(recipe, "qwix")
    wide = make_cast(recipe.compute)
    casts = recipe.casts
    for place in GEMM_PLACES:
        found += cast_refusals(place, casts[place], [*_said(casts[place]), wide], "qwix")
    if found:
        return found
    for gemm in GEMMS:
        a, b = (casts[place] for place in GROUPS[gemm])
        if _tile(a) != _tile(b):
            why = f"block = {_tile(b)} with {_tile(a)}; qwix tiles both operands of a GEMM alike"
            found.append(Refusal(gemm, "block", why))
    if wide in (casts["fprop.x"], casts["fprop.w"]):
        why = "a wide operand in fprop, but qwix leaves a module alone whose weight is not quantized"
        found.append(Refusal("fprop", "element", why))
    return found


def _tile(c: Cast) -> int | None:
    return c.block[1] if c.block and c.block[1] else None


def text(recipe: Recipe, blocks: int | None = None) -> str:
    """The Python file."""
    modules, first, last = kept(recipe)
    keys = ",\n            ".join(f"{k}={v}" for k, v in _rule(recipe).items())
    return _FILE.format(
        patterns=[_regex(m) for m in modules], first=first, last=last, compute=recipe.compute, rule=keys
    )


def _rule(recipe: Recipe) -> Mapping[str, Any]:
    """The keys of the rule for the layers that are narrow."""
    casts = recipe.casts
    tile = _tile(casts["fprop.x"])
    keys: dict[str, Any] = {
        "act_qtype": _dtype(casts["fprop.x"]),
        "weight_qtype": _dtype(casts["fprop.w"]),
        "bwd_qtype": _dtype(casts["dgrad.dy"]) if casts["dgrad.dy"].is_scaled else _dtype(casts["wgrad.dy"]),
    }
    keys |= {"tile_size": tile} if tile else {}
    # Forward: x on the left, w on the right. dlhs is dgrad, drhs is wgrad; a residual is the other operand.
    more: dict[str, Any] = {"use_original_residuals": True}
    for side, place in (("lhs", "fprop.x"), ("rhs", "fprop.w")):
        more[f"{side}_disable_channelwise_axes"] = casts[place].block is None
    for side, gemm, other in (("dlhs", "dgrad", "w"), ("drhs", "wgrad", "x")):
        dy, residual = casts[f"{gemm}.dy"], casts[f"{gemm}.{other}"]
        more[f"{side}_grad_qtype"] = _dtype(dy)
        more[f"{side}_grad_disable_channelwise_axes"] = dy.block is None
        more[f"{side}_tile_size"] = _tile(dy)
        more[f"{side}_residual_qtype"] = _dtype(residual)
        more[f"{side}_residual_disable_channelwise_axes"] = residual.block is None
    said = ",\n                ".join(f'"{k}": {v}' for k, v in more.items())
    return keys | {"additional_qt_config": "{\n                " + said + ",\n            }"}


def _dtype(c: Cast) -> str:
    return DTYPES[c.element.name] if c.is_scaled else "None"


def _regex(pattern: str) -> str:
    """A regular expression of module paths for a recipe's pattern; it also matches a name's last part."""
    special = {"*": ".*", "?": ".", ".": "/"}
    made = "".join(special.get(ch, ch if ch.isalnum() or ch in "_[]-" else f"\\{ch}") for ch in pattern)
    return made if "." in pattern else f"(.*/)?{made}"


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
            {rule},
        ),
    ]
'''


def notes(recipe: Recipe) -> list[str]:
    """How the values of qwix differ from the recipe, and what its user must do."""
    return [
        "Give rules(blocks) to qwix.QtProvider, and this to qwix.quantize_model. Inputs have to be on the "
        "left of jax.lax.dot_general, parameters on the right, as in flax's Dense and Linear.",
        "qwix divides by amax / max, where the recipe multiplies by max / amax: scales may differ in their "
        "last bit, and values near the midpoint of two codes may be rounded to the other one.",
        "Scales are in the dtype of the tensor: in bfloat16, qwix rounds them to bfloat16. In float32 they "
        "are the recipe's.",
    ]

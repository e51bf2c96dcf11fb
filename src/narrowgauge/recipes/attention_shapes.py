"""Checks that the blocks of a recipe's casts fit attention and the residual stream of a model.

A head's tensors are matrices, and a matmul contracts one of their dimensions. Legend: T queries, S keys
(both are the sequence), H head_dim.
"""

from collections.abc import Iterator, Mapping

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast
from narrowgauge.recipes.attention_places import ATTENTION_PRODUCTS, STREAM
from narrowgauge.recipes.recipe import Recipe

_CONTRACTED = dict(zip(ATTENTION_PRODUCTS, "HSTHST", strict=True))
_DIMENSIONS = {"q": "TH", "k": "SH", "v": "SH", "p": "TS", "do": "TH", "ds": "TS"}


def require_attention_shapes(
    recipe: Recipe, head_dim: int, sequence_length: int, dim: int, attention_dropout: float = 0.0
) -> None:
    """Refuse blocks and transforms that do not fit a model's heads, its sequences or its width.

    `dim` is the width of the residual stream, `attention_dropout` the share of probabilities that become 0.

    Raises:
        UserError: A block does not fit, or probabilities are dropped where attention is narrow.
    """
    where = f"recipe {recipe.name!r}"
    if recipe.narrows_attention and attention_dropout:
        raise UserError(
            f"model.attention_dropout = {attention_dropout} under {where}, which narrows attention, and "
            "probabilities with dropout have no place in a recipe; set model.attention_dropout = 0"
        )
    sizes = {"H": ("model.head_dim", head_dim)}
    sizes |= dict.fromkeys("TS", ("data.sequence_length", sequence_length))
    for mapping in (recipe.attention, *(r.attention for r in recipe.rules)):
        for place, cast, along, across in _uses({**recipe.attention, **mapping}):
            rows, columns = cast.block or (0, 0)
            _require(rows, *sizes[across], cast, f"{where}: {place}")
            _require(columns, *sizes[along], cast, f"{where}: {place}")
            _require(cast.hadamard, *sizes[along], cast, f"{where}: {place}")
    _require((recipe.stream.block or (0, 0))[1], "model.dim", dim, recipe.stream, f"{where}: {STREAM}")


def _uses(casts: Mapping[str, Cast | None]) -> Iterator[tuple[str, Cast, str, str]]:
    """(place, cast, dimension that is contracted, the other) of each narrow operand."""
    for product, places in ATTENTION_PRODUCTS.items():
        for place in places:
            cast = casts.get(place)
            if cast is not None and cast.is_scaled:
                along = _CONTRACTED[product]
                yield place, cast, along, _DIMENSIONS[place.partition(".")[2]].replace(along, "")


def _require(block: int, name: str, size: int, cast: Cast, where: str) -> None:
    if block and size % block:
        raise UserError(
            f"{where} = {cast.name!r} has blocks of {block}, and {name} = {size} is not a multiple of "
            f"{block}; take blocks that divide it, block = 'row' or 'tensor', or another {name}"
        )

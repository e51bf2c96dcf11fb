"""Checks that the blocks of a recipe's casts fit attention and the residual stream of a model.

A head's tensors are matrices, and each of their dimensions is contracted by one of their matmuls. Legend:
T tokens of a sequence, queries or keys; H head_dim; D the width of the stream.
"""

from narrowgauge.recipes.attention_places import STREAM
from narrowgauge.recipes.placement import spans
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

#: The (remaining, contracted) dimensions of each place, in each of its matmuls.
_DIMENSIONS = {
    **dict.fromkeys(("attention.q", "attention.k"), ("TH", "HT")),
    **dict.fromkeys(("attention.v", "attention.do"), ("HT", "TH")),
    **dict.fromkeys(("attention.p", "attention.ds"), ("TT",)),
    STREAM: (" D",),
}


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
    sizes = {"H": ("model.head_dim", head_dim), "T": ("data.sequence_length", sequence_length)}
    sizes["D"] = ("model.dim", dim)
    mappings = (recipe.attention, *(r.attention for r in recipe.rules))
    casts = [c for m in mappings for c in {**recipe.attention, **m, STREAM: recipe.stream}.items()]
    uses = [(place, c, d) for place, c in casts if c is not None for d in _DIMENSIONS[place]]
    for place, cast, dimensions in uses:
        for what, dimension, block in spans(dimensions, cast):
            name, size = sizes.get(dimension, ("", 0))
            if size % block:
                raise UserError(
                    f"{where}: {place} = {cast.name!r} has {what}s of {block}, and {name} = {size} is not a "
                    f"multiple of {block}; take {what}s that divide it, or another {name}"
                )

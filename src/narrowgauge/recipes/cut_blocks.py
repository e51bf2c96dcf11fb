"""Blocks that do not fit a model: the last one along a dimension holds less than its cast says.

Blocks are laid from the first row and the first column on, and what is left at the edge is a block as well.
It is computed as if zeros filled it up: its scale is that of fewer values. Where all blocks are cut, the cast
is another one than it says: blocks of 4096 rows on 257 rows are blocks of 257. So the plan, a run and its
page name what is cut.
"""

from collections.abc import Iterator

from narrowgauge.quantization import Cast
from narrowgauge.recipes.outline import Outline
from narrowgauge.recipes.places import DIMENSIONS, STATE_PLACES
from narrowgauge.recipes.recipe import Recipe

_WORDS = {"M": "tokens", "N": "outputs", "K": "inputs"}


def cut_blocks(recipe: Recipe, outline: Outline, tokens: int = 0) -> list[str]:
    """A sentence for each size of blocks, or of a transform, that does not divide the tensors of some layers.

    Args:
        recipe: The recipe.
        outline: The model.
        tokens: The tokens of a forward pass; 0 where they are not known, as in an expert.
    """
    found: dict[tuple[str, str, int], dict[str, dict[str, None]]] = {}
    sizes: dict[tuple[str, str, int], dict[str, int]] = {}
    resolved = outline.resolved(outline.in_model(recipe))
    for layer in outline.layers:
        outputs, inputs = outline.shapes[layer]
        extents = {"M": 0 if ".experts." in layer else tokens, "N": outputs, "K": inputs}
        for place, cast in _casts(resolved[layer]):
            for what, dimension, size in _spans(place, cast):
                if extents[dimension] % size:
                    key = (what, dimension, size)
                    found.setdefault(key, {}).setdefault(place, {})[layer] = None
                    sizes.setdefault(key, {})[layer] = extents[dimension]
    return [_sentence(key, list(places), sizes[key], len(outline.layers)) for key, places in found.items()]


def _sentence(key: tuple[str, str, int], places: list[str], sizes: dict[str, int], layers: int) -> str:
    what, dimension, size = key
    layer, extent = max(sizes.items(), key=lambda item: size - item[1] % size)
    which = "only" if extent < size else "last"
    return (
        f"{what}s of {size} in {', '.join(places)} do not divide the {_WORDS[dimension]} of {len(sizes)} of "
        f"{layers} layers: {layer} has {extent}, so its {which} {what} holds {extent % size}, "
        "padded with zeros"
    )


def _casts(recipe: Recipe) -> Iterator[tuple[str, Cast]]:
    """The places of a layer, and all casts that they have in some step."""
    for casts in (recipe.casts, *(rule.casts for rule in recipe.rules)):
        yield from casts.items()
    if isinstance(recipe.saved, Cast):
        yield "saved", recipe.saved
    for state in (recipe.state, *(rule.state for rule in recipe.rules)):
        yield from ((place, cast) for place in STATE_PLACES if (cast := state.get(place)) is not None)


def _spans(place: str, cast: Cast) -> Iterator[tuple[str, str, int]]:
    """(what, dimension, size) of all that a cast lays along a dimension in pieces of a fixed size."""
    if not cast.is_scaled:
        return
    for dimension, size in zip(DIMENSIONS[place], cast.block or (0, 0), strict=True):
        if size > 1:
            yield "block", dimension, size
    if cast.hadamard:
        yield "transform", DIMENSIONS[place][1], cast.hadamard

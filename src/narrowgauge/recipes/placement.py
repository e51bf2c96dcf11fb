"""Describes a recipe's places in a model: which layers stay wide, and which blocks do not fit.

Blocks start at the first row and the first column, and the remainder at the edge is also a block. It is
padded with zeros: its scale is that of fewer values. If all blocks are cut, the cast is effectively another
one: blocks of 4096 rows on 257 rows are blocks of 257. So the plan, a run and its page report what is cut.
"""

from collections.abc import Iterator, Sequence

from narrowgauge.quantization import Cast
from narrowgauge.recipes.places import STATE_PLACES, STREAM
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.resolve import HEADS, ModelPlan, found_patterns, operands_of, state_of
from narrowgauge.system.errors import UserError

# For the tensor in each place of a linear layer: the dimension that remains in the GEMM's result, and the one
# that it contracts. M tokens, N outputs, K inputs.
DIMENSIONS = {
    "fprop.x": "MK",
    "saved": "MK",
    "fprop.w": "NK",
    "dgrad.dy": "MN",
    "dgrad.w": "KN",
    "wgrad.dy": "NM",
    "wgrad.x": "KM",
    **dict.fromkeys(STATE_PLACES, "NK"),
}
#: The (remaining, contracted) dimensions of places of attention, in each of their matmuls, and of the stream:
#: T tokens of a sequence, queries or keys; H head_dim; D the width of the stream.
_DIMENSIONS = {
    **dict.fromkeys(("attention.q", "attention.k"), ("TH", "HT")),
    **dict.fromkeys(("attention.v", "attention.do"), ("HT", "TH")),
    **dict.fromkeys(("attention.p", "attention.ds"), ("TT",)),
    STREAM: (" D",),
}
_LISTED = 4  # names of one kind that are written out; more are abbreviated
_WORDS = {"M": "tokens", "N": "outputs", "K": "inputs"}


def kept_text(plan: ModelPlan) -> str:
    """The layers that a narrow recipe leaves in `compute`, on one line; "" for a recipe that narrows none."""
    recipe, outline, wide = plan.own, plan.outline, plan.wide_layers
    if not recipe.is_narrow:
        return ""
    words = _grouped(wide, outline.blocks, [*outline.layers, *outline.untouched]) if wide else "no layer"
    notes = []
    for rule in recipe.rules:
        known = outline.names_for(rule)
        lost = [p for p in rule.modules if p not in HEADS and not found_patterns([p], known)]
        notes += [f"{pattern!r} matches no layer" for pattern in lost]
        if (rule.first_blocks or rule.last_blocks) and not outline.blocks:
            notes.append("the model has no repeated blocks")
    return "; ".join([f"kept in {recipe.compute}: {words}", *dict.fromkeys(notes)])


def _grouped(layers: Sequence[str], blocks: Sequence[str], everything: Sequence[str]) -> str:
    """Names on one line: whole blocks, then layers; many of one kind with `*` in place of their numbers."""
    chosen, runs, rest = set(layers), list[list[str]](), []
    inside = _by_block(everything, blocks)
    before = -2
    for number, block in enumerate(blocks):
        if inside[block] and chosen.issuperset(inside[block]):
            same_stack = runs and runs[-1][0].rpartition(".")[0] == block.rpartition(".")[0]
            if same_stack and number == before + 1:
                runs[-1].append(block)
            else:
                runs.append([block])
            before = number
            chosen.difference_update(inside[block])
    whole = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    kinds: dict[str, list[str]] = {}
    for name in (name for name in layers if name in chosen):
        kinds.setdefault(".".join("*" if w.isdecimal() else w for w in name.split(".")), []).append(name)
    for kind, names in kinds.items():
        rest += names if len(names) <= _LISTED else [f"{kind} ({len(names)} layers)"]
    return ", ".join([*whole, *rest])


def _by_block(names: Sequence[str], blocks: Sequence[str]) -> dict[str, list[str]]:
    """The layers of each block."""
    found: dict[str, list[str]] = {block: [] for block in blocks}
    for name in names:
        words = name.split(".")
        for end in range(1, len(words)):
            found.get(".".join(words[:end]), []).append(name)
    return found


def cut_blocks(plan: ModelPlan, tokens: int = 0) -> list[str]:
    """A sentence for each size of blocks, or of a transform, that does not divide the tensors of some layers.

    Args:
        plan: The recipe in a model.
        tokens: The tokens of a forward pass; 0 where they are unknown, as in an expert.
    """
    found: dict[tuple[str, str, int], dict[str, dict[str, None]]] = {}
    sizes: dict[tuple[str, str, int], dict[str, int]] = {}
    outline = plan.outline
    for layer in outline.layers:
        outputs, inputs = outline.shapes[layer]
        extents = {"M": 0 if ".experts." in layer else tokens, "N": outputs, "K": inputs}
        for place, cast in (*operands_of(plan.parts[layer]), *state_of(plan.parts[layer])):
            for what, dimension, size in spans(DIMENSIONS[place], cast):
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


def spans(dimensions: str, cast: Cast) -> Iterator[tuple[str, str, int]]:
    """(what, dimension, size) of everything a cast lays along a dimension in pieces of a fixed size.

    `dimensions` are a tensor's (remaining, contracted) ones, as in `DIMENSIONS`.
    """
    if not cast.is_scaled:
        return
    for dimension, size in zip(dimensions, cast.block or (0, 0), strict=True):
        if size > 1:
            yield "block", dimension, size
    if cast.hadamard:
        yield "transform", dimensions[1], cast.hadamard


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
    mappings = ({**recipe.places, **of.places} for of in (recipe, *recipe.rules))
    casts = [(place, casts[place]) for casts in mappings for place in _DIMENSIONS if place in casts]
    uses = [(place, c, d) for place, c in casts if c is not None for d in _DIMENSIONS[place]]
    for place, cast, dimensions in uses:
        for what, dimension, block in spans(dimensions, cast):
            name, size = sizes.get(dimension, ("", 0))
            if size % block:
                raise UserError(
                    f"{where}: {place} = {cast.name!r} has {what}s of {block}, and {name} = {size} is not a "
                    f"multiple of {block}; take {what}s that divide it, or another {name}"
                )

"""A recipe resolved in a model, once: the casts of each layer, each attention and each moment.

A recipe is casts and rules; a rule selects layers by name or block, or starts at a step. `resolve` applies
every rule to every layer once, and all readers use the plan: `convert` builds layers from it, an optimizer
takes the casts of moments from it, and a run prints which layers stay wide and which blocks do not fit. A
rule that starts at a step remains in the recipe of the layer: `operands_of` lists the casts of all times,
`Recipe.at` has the casts of one step.

A rule names layers by patterns (`places.matches`). `head` is a role as well as a name: it selects the layer
that produces the model's output, whatever its name. A pattern may match nothing if another of the same list
matches. A list that matches nothing at all is a mistake, unless it keeps the head of a model without one.

Blocks start at the first row and the first column, and the remainder at the edge is also a block. It is
padded with zeros: its scale is that of fewer values. If all blocks are cut, the cast is effectively another
one: blocks of 4096 rows on 257 rows are blocks of 257. So the plan, a run and its page report what is cut.

An `Outline` describes the full model, even if a process holds only part of it: `nn.outline_of` makes one from
modules, `training.outline` from a configuration. `products_on` (`backend.py`) resolves the recipe of a layer
for a device: the GEMMs that run natively, and the code that makes each operand.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from narrowgauge.quantization import Cast
from narrowgauge.recipes.places import GEMM_PLACES, STATE_PLACES, STREAM, Rule, matches, wide_operands
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError

HEAD = "head"
HEADS = (HEAD, "lm_head")  #: names in recipes for an output head that a model may lack
ROUTER = "router"  # the last component of the name of a layer that chooses experts

#: By the name of a module: all its names, each with the number of its block, if it is in one.
Names = Mapping[str, Sequence[tuple[str, int | None]]]


@dataclass(frozen=True, slots=True)
class Outline:
    """The names that rules of a recipe select from.

    Attributes:
        layers: The linear layers by their first name. One that the model holds twice has two names, and the
            output head is also called `head`.
        shapes: (outputs, inputs) of each linear layer.
        blocks: The names of the repeated blocks, in the order of the model.
        attention: The attentions that a recipe can change, by name, in the form of `layers`.
        owners: All modules that own parameters, in the form of `layers`; rules about moments select these.
        untouched: The names of linear layers that stay as they are (`nn.transformer.outline`).
    """

    layers: Names
    shapes: Mapping[str, tuple[int, int]]
    blocks: Sequence[str] = ()
    attention: Names = field(default_factory=dict)
    owners: Names = field(default_factory=dict)
    untouched: Sequence[str] = ()

    @property
    def head(self) -> list[str]:
        """The layers that produce the model's output."""
        return [layer for layer, names in self.layers.items() if (HEAD, None) in names]

    @property
    def layer_names(self) -> list[str]:
        """Every name of a linear layer, roles included."""
        return list(dict.fromkeys(name for names in self.layers.values() for name, _ in names))

    def names_for(self, rule: Rule) -> list[str]:
        """The names that a rule selects from: the modules with a place that it sets."""
        names = self.layer_names
        if rule.attention:
            names += self.attention
        if rule.keeps_state:
            names += self.untouched  # these are already wide
        if {"m", "v"} & rule.state.keys():
            names += self.owners
        return names


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A recipe in a model.

    Attributes:
        recipe: The recipe; in a mixture of experts, with a rule that keeps routers wide.
        outline: The names of the model.
        parts: The recipe of each layer, attention and owner of parameters, by its first name: the rules that
            select it are merged in, and those that wait for a step remain.
    """

    recipe: Recipe
    outline: Outline
    parts: Mapping[str, Recipe]

    @property
    def wide_layers(self) -> list[str]:
        """The linear layers whose matmuls are in `compute` at any time, including untouched ones."""
        wide = (layer for layer in self.outline.layers if not self.parts[layer].is_narrow)
        return [*wide, *self.outline.untouched]


def resolve(recipe: Recipe, outline: Outline) -> ModelPlan:
    """Resolve a recipe in a model.

    A router chooses experts by small differences, and costs next to nothing: it is in `compute`, unless one
    of the recipe's rules sets it.
    """
    if any(matches(name, ROUTER) for name in outline.layer_names):
        wide = Rule(places=wide_operands(recipe.compute), keeps_state=True, modules=(ROUTER,))
        recipe = recipe if wide in recipe.rules else replace(recipe, rules=(wide, *recipe.rules))
    parts: dict[str, Recipe] = {}
    alike: dict[tuple[bool, ...], Recipe] = {}  # by the rules that select them
    blocks = len(outline.blocks)
    for name, names in {**outline.owners, **outline.attention, **outline.layers}.items():
        chosen = tuple(any(rule.selects(n, b, blocks) for n, b in names) for rule in recipe.rules)
        if chosen not in alike:
            alike[chosen] = recipe.for_layer(names, blocks)
        parts[name] = alike[chosen]
    return ModelPlan(recipe, outline, parts)


def operands_of(layer: Recipe) -> Iterator[tuple[str, Cast]]:
    """The places of a layer's operands, including `saved`, with every cast that they have at any time."""
    yield from layer.ever_in(GEMM_PLACES)
    if isinstance(layer.saved, Cast):
        yield "saved", layer.saved


def require_matches(recipe: Recipe, outline: Outline) -> None:
    """Refuse a recipe with a rule, or a list of kept layers, that matches nothing in a model.

    Raises:
        UserError: There is one; the message suggests the nearest layer.
    """
    for rule in recipe.rules:
        names = outline.names_for(rule)
        word = "[keep]" if rule.keeps_state else "a [[rule]] with"
        if rule.modules and not found_patterns(rule.modules, names):
            if rule.keeps_state and set(HEADS) & set(rule.modules) and not outline.head:
                continue  # the model has no head to keep
            raise UserError(
                f"recipe {recipe.name!r}: {word} modules = {list(rule.modules)} matches no layer of the "
                f"model{nearest(rule.modules[0], names)}"
            )
        if not (rule.modules or rule.is_for_all or rule.keeps_state or outline.blocks):
            raise UserError(
                f"recipe {recipe.name!r}: {word} first_blocks or last_blocks, and the model has no repeated "
                "blocks; name its layers with modules"
            )


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The end of a message about a pattern that matches nothing: the nearest name, and valid forms."""
    names = list(dict.fromkeys(names))
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    known = {name.lower(): name for name in (*last, *names[:2000])}
    found = get_close_matches(pattern.lower(), list(known), n=1, cutoff=0.4)
    example = names[-1]
    hint = f"; the nearest name is {known[found[0]]!r}" if found else ""
    return (
        f"{hint}; use a whole name such as {example!r}, its last component "
        f"{example.rpartition('.')[2]!r}, or a pattern such as '*'"
    )


def found_patterns(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns that match any of some names."""
    return [p for p in patterns if any(matches(name, p) for name in names)]


#: For the tensor in each place, in each of its matmuls: the dimension that remains in the GEMM's result, and
#: the one that it contracts. M tokens, N outputs, K inputs of a linear layer; T tokens of a sequence, queries
#: or keys; H head_dim; D the width of the stream.
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "fprop.x": ("MK",),
    "saved": ("MK",),
    "fprop.w": ("NK",),
    "dgrad.dy": ("MN",),
    "dgrad.w": ("KN",),
    "wgrad.dy": ("NM",),
    "wgrad.x": ("KM",),
    **dict.fromkeys(STATE_PLACES, ("NK",)),
    **dict.fromkeys(("attention.q", "attention.k"), ("TH", "HT")),
    **dict.fromkeys(("attention.v", "attention.do"), ("HT", "TH")),
    **dict.fromkeys(("attention.p", "attention.ds"), ("TT",)),
    STREAM: (" D",),
}
_LISTED = 4  # names of one kind that are written out; more are abbreviated
_WORDS = {"M": "tokens", "N": "outputs", "K": "inputs"}


def kept_text(plan: ModelPlan) -> str:
    """The layers that a narrow recipe leaves in `compute`, on one line; "" for a recipe that narrows none."""
    recipe, outline, wide = plan.recipe, plan.outline, plan.wide_layers
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
    left, runs, before = set(layers), list[list[str]](), -2
    for number, block in enumerate(blocks):
        inside = {name for name in everything if name.startswith(f"{block}.")}
        if not inside or not inside <= left:
            continue
        left -= inside
        same_stack = runs and runs[-1][0].rpartition(".")[0] == block.rpartition(".")[0]
        if same_stack and number == before + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
        before = number
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    kinds: dict[str, list[str]] = {}
    for name in (name for name in layers if name in left):
        kinds.setdefault(".".join("*" if w.isdecimal() else w for w in name.split(".")), []).append(name)
    for kind, names in kinds.items():
        words += names if len(names) <= _LISTED else [f"{kind} ({len(names)} layers)"]
    return ", ".join(words)


def cut_blocks(plan: ModelPlan, tokens: int = 0) -> list[str]:
    """A sentence for each size of blocks, or of a transform, that does not divide the tensors of some layers.

    Args:
        plan: The recipe in a model.
        tokens: The tokens of a forward pass; 0 where they are unknown, as in an expert.
    """
    found: dict[tuple[str, str, int], tuple[dict[str, None], dict[str, int]]] = {}  # places, and layers
    outline = plan.outline
    for layer in outline.layers:
        outputs, inputs = outline.shapes[layer]
        extents = {"M": 0 if ".experts." in layer else tokens, "N": outputs, "K": inputs}
        part = plan.parts[layer]
        for place, cast in (*operands_of(part), *part.ever_in(STATE_PLACES)):
            for cut in _cut(place, cast, extents):
                places, extent_of = found.setdefault(cut, ({}, {}))
                places[place] = None
                extent_of[layer] = extents[cut[1]]
    sentences = []
    for (what, dimension, size), (places, extent_of) in found.items():
        layer, extent = min(extent_of.items(), key=lambda item: item[1] % size)
        which = "only" if extent < size else "last"
        sentences.append(
            f"{what}s of {size} in {', '.join(places)} do not divide the {_WORDS[dimension]} of "
            f"{len(extent_of)} of {len(outline.layers)} layers: {layer} has {extent}, so its {which} {what} "
            f"holds {extent % size}, padded with zeros"
        )
    return sentences


def _cut(place: str, cast: Cast, extents: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """(what, dimension, size) of all that a cast lays along a dimension in pieces that do not divide it.

    `extents` are the sizes of dimensions; one that is not among them is not checked.
    """
    for dimensions in DIMENSIONS[place] if cast.is_scaled else ():
        pieces = [("block", *of) for of in zip(dimensions, cast.block or (1, 1), strict=True)]
        pieces.append(("transform", dimensions[1], cast.hadamard))
        yield from (piece for piece in pieces if piece[2] and extents.get(piece[1], 0) % piece[2])


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
    extents = {"H": head_dim, "T": sequence_length, "D": dim}
    names = {"H": "model.head_dim", "T": "data.sequence_length", "D": "model.dim"}
    for place, cast in recipe.ever_in(DIMENSIONS):
        for what, dimension, block in _cut(place, cast, extents):
            name, size = names[dimension], extents[dimension]
            raise UserError(
                f"{where}: {place} = {cast.name!r} has {what}s of {block}, and {name} = {size} is not a "
                f"multiple of {block}; take {what}s that divide it, or another {name}"
            )

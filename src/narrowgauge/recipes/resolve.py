"""A recipe resolved in a model, once: the casts of each layer, each attention and each moment.

A recipe is casts and rules; a rule selects layers by name or block, or starts at a step. `resolve` applies
every rule to every layer once, and all readers use the plan: `convert` builds layers from it, an optimizer
takes the casts of moments from it, and a run prints which layers stay wide and which blocks do not fit. A
rule that starts at a step remains in the recipe of the layer: `operands_of` lists the casts of all times,
`casts_at` has the casts of one step.

A rule names layers by patterns (`rule.matches`). `head` is a role as well as a name: it selects the layer
that produces the model's output, whatever its name. A pattern may match nothing if another of the same list
matches. A list that matches nothing at all is a mistake, unless it keeps the head of a model without one.

An `Outline` describes the full model, even if a process holds only part of it: `nn.outline_of` makes one from
modules, `training.outline` from a configuration. `products_on` (`backend.py`) resolves the recipe of a layer
for a device: the GEMMs that run natively, and the code that makes each operand.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from narrowgauge.quantization import Cast
from narrowgauge.recipes.places import STATE_PLACES, Rule, matches
from narrowgauge.recipes.recipe import ROUTER, Recipe
from narrowgauge.system.errors import UserError

HEAD = "head"
HEADS = (HEAD, "lm_head")  #: names in recipes for an output head that a model may lack

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
        own: The recipe as it was given.
        recipe: The recipe with the rules that any recipe gets in this model: routers of experts stay wide.
        outline: The names of the model.
        parts: The recipe of each layer and of each attention, by its first name: the rules that select it are
            merged in, and those that wait for a step remain.
    """

    own: Recipe
    recipe: Recipe
    outline: Outline
    parts: Mapping[str, Recipe]

    @property
    def wide_layers(self) -> list[str]:
        """The linear layers whose matmuls are in `compute` at any time, including untouched ones."""
        wide = (layer for layer in self.outline.layers if not self.parts[layer].is_narrow)
        return [*wide, *self.outline.untouched]

    def moments_of(self, owner: str) -> dict[str, Cast]:
        """The casts of the moments ("m", "v") of a module's parameters, if rules set them."""
        found: dict[str, Cast] = {}
        blocks = len(self.outline.blocks)
        for name, block in self.outline.layers.get(owner) or self.outline.owners[owner]:
            for rule in self.own.rules:
                if not rule.is_timed and rule.selects(name, block, blocks):
                    found |= {p: c for p, c in rule.state.items() if p in ("m", "v") and c is not None}
        return found


def resolve(recipe: Recipe, outline: Outline) -> ModelPlan:
    """Resolve a recipe in a model."""
    has_routers = any(matches(name, ROUTER) for name in outline.layer_names)
    in_model = recipe.with_wide_routers() if has_routers else recipe
    parts: dict[str, Recipe] = {}
    alike: dict[tuple[bool, ...], Recipe] = {}  # by the rules that select them
    blocks = len(outline.blocks)
    for name, names in {**outline.attention, **outline.layers}.items():
        chosen = tuple(any(rule.selects(n, b, blocks) for n, b in names) for rule in in_model.rules)
        if chosen not in alike:
            alike[chosen] = in_model.for_layer(names, blocks)
        parts[name] = alike[chosen]
    return ModelPlan(recipe, in_model, outline, parts)


def operands_of(layer: Recipe) -> Iterator[tuple[str, Cast]]:
    """The places of a layer's operands, including `saved`, with every cast that they have at any time."""
    for casts in (layer.casts, *(rule.casts for rule in layer.rules)):
        yield from casts.items()
    if isinstance(layer.saved, Cast):
        yield "saved", layer.saved


def state_of(layer: Recipe) -> Iterator[tuple[str, Cast]]:
    """The places of a layer's state, with every cast that they have at any time."""
    for state in (layer.state, *(rule.state for rule in layer.rules)):
        yield from ((place, cast) for place in STATE_PLACES if (cast := state.get(place)) is not None)


def casts_at(layer: Recipe, step: int, steps: int | None, decay: int | None) -> dict[str, Cast]:
    """The casts of a layer's operands in one step (`Rule.holds`)."""
    casts = dict(layer.casts)
    for rule in layer.rules:
        if rule.is_for_all and rule.holds(step, steps, decay):
            casts |= rule.casts
    return casts


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

"""The places of a whole model, as the rules of a recipe select them: by name, by role, and by block.

A rule names layers by patterns (`rule.matches`). `head` is a role as well as a name: the layer that makes the
model's output is selected by it, whatever it is called. A pattern may match nothing where another of the same
list matches. A list that matches nothing at all is a mistake, unless a model without a head should keep it.

An `Outline` is made of the full model, also where a process holds a part of it: of modules by
`nn.outline_of`, of a configuration by `training.outline`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast
from narrowgauge.recipes.recipe import ROUTER, Recipe
from narrowgauge.recipes.rule import Rule, matches

HEAD = "head"
HEADS = (HEAD, "lm_head")  #: what recipes call an output head that a model may lack
_LISTED = 4  # names of one kind up to which each is written out

#: By the name of a module: all its names, each with the number of its block, if it is in one.
Names = Mapping[str, Sequence[tuple[str, int | None]]]


@dataclass(frozen=True, slots=True)
class Outline:
    """The names that rules of a recipe select from.

    Attributes:
        layers: The linear layers by their first name. One that the model holds twice has two names, and the
            output head is called `head` as well.
        shapes: (outputs, inputs) of each linear layer.
        blocks: The names of the repeated blocks, in the order of the model.
        attention: The attentions that a recipe reaches, by name, in the form of `layers`.
        owners: All modules that have parameters of their own, likewise; rules about moments select these.
        untouched: The names of linear layers that stay as they are (`nn.transformer.own_forward`).
    """

    layers: Names
    shapes: Mapping[str, tuple[int, int]]
    blocks: Sequence[str] = ()
    attention: Names = field(default_factory=dict)
    owners: Names = field(default_factory=dict)
    untouched: Sequence[str] = ()

    @property
    def head(self) -> list[str]:
        """The layers that make the model's output."""
        return [layer for layer, names in self.layers.items() if (HEAD, None) in names]

    @property
    def layer_names(self) -> list[str]:
        """Every name of a linear layer, roles included."""
        return list(dict.fromkeys(name for names in self.layers.values() for name, _ in names))

    def in_model(self, recipe: Recipe) -> Recipe:
        """The recipe with the rules that any recipe has in this model: routers of experts stay wide."""
        has_routers = any(matches(name, ROUTER) for name in self.layer_names)
        return recipe.with_wide_routers() if has_routers else recipe

    def resolved(self, recipe: Recipe) -> dict[str, Recipe]:
        """The recipe of each layer and of each attention, with the rules that select it merged in."""
        found: dict[str, Recipe] = {}
        alike: dict[tuple[bool, ...], Recipe] = {}  # those that the same rules select
        blocks = len(self.blocks)
        for name, names in {**self.attention, **self.layers}.items():
            chosen = tuple(any(rule.selects(n, b, blocks) for n, b in names) for rule in recipe.rules)
            if chosen not in alike:
                alike[chosen] = recipe.for_layer(names, blocks)
            found[name] = alike[chosen]
        return found

    def moments_of(self, recipe: Recipe, owner: str) -> dict[str, Cast]:
        """What rules say of the moments of a module's parameters."""
        found: dict[str, Cast] = {}
        for name, block in self.layers.get(owner) or self.owners[owner]:
            found |= recipe.moments_of(name, block, len(self.blocks))
        return found

    def names_for(self, rule: Rule) -> list[str]:
        """The names that a rule selects from: those of modules that have a place which it sets."""
        names = self.layer_names
        if rule.attention:
            names += self.attention
        if rule.keeps_state:
            names += self.untouched  # they are wide as they stand
        if {"m", "v"} & rule.state.keys():
            names += self.owners
        return names

    def wide_layers(self, recipe: Recipe) -> list[str]:
        """The linear layers whose products are in `compute` at any time, those left as they are included."""
        resolved = self.resolved(self.in_model(recipe))
        return [*(layer for layer in self.layers if not resolved[layer].is_narrow), *self.untouched]


def require_matches(recipe: Recipe, outline: Outline) -> None:
    """Refuse a recipe with a rule, or a list of kept layers, that matches nothing in a model.

    Raises:
        UserError: There is one; the sentence names the nearest layer.
    """
    for rule in recipe.rules:
        names = outline.names_for(rule)
        word = "[keep]" if rule.keeps_state else "a [[rule]] with"
        if rule.modules and not _found(rule.modules, names):
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
    """The end of a sentence about a pattern that matches nothing: the nearest name, and what it may be."""
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


def _found(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns that match any of some names."""
    return [p for p in patterns if any(matches(name, p) for name in names)]


def kept_text(recipe: Recipe, outline: Outline) -> str:
    """The layers that a narrow recipe leaves in `compute`, on one line; "" for a recipe that narrows none."""
    wide = outline.wide_layers(recipe)
    if not recipe.is_narrow:
        return ""
    words = _grouped(wide, outline.blocks, [*outline.layers, *outline.untouched]) if wide else "no layer"
    notes = []
    for rule in recipe.rules:
        known = outline.names_for(rule)
        lost = [p for p in rule.modules if p not in HEADS and not _found([p], known)]
        notes += [f"{pattern!r} matches no layer" for pattern in lost]
        if (rule.first_blocks or rule.last_blocks) and not outline.blocks:
            notes.append("the model has no repeated blocks")
    return "; ".join([f"kept in {recipe.compute}: {words}", *dict.fromkeys(notes)])


def _grouped(layers: Sequence[str], blocks: Sequence[str], everything: Sequence[str]) -> str:
    """Names on one line: whole blocks, then layers; many of one kind with `*` for their numbers."""
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

"""What another tool cannot express of a recipe, key by key.

A tool is described by tables of casts, and an operand must equal one of them in every field. So a key that is
new in recipes is refused for every tool until its meaning there is written down. The same holds for a
recipe's other facts: those that no GEMM sees are listed here, any other must be at its default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.describe import NONE, cast_text, is_wide_rule, key_value, recipe_facts
from narrowgauge.recipes.places import GEMM_PLACES, GEMMS, GROUPS, Rule
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.recipe_rules import reuses
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_value

#: The places that quantize each tensor, by the name that tools have for it: in its first and its second GEMM.
TENSORS = {
    "input": ("fprop.x", "wgrad.x"),
    "weight": ("fprop.w", "dgrad.w"),
    "grad_output": ("dgrad.dy", "wgrad.dy"),
}
#: The operands of each GEMM.
OF_GEMM = {gemm: GROUPS[gemm] for gemm in GEMMS}
# The facts of a recipe that a target handles, and those that affect no value.
_HANDLED = (*GEMM_PLACES, "compute", "keep", "saved", "gather", "offload")
_CLOCK = ("from_step", "from_share", "from_decay", "until_step", "until_share", "until_decay")


class Layers(NamedTuple):
    """The layers that a file makes narrow: those of some patterns, or all; and those that it keeps wide."""

    only: tuple[str, ...] = ()  # patterns; () for all
    modules: tuple[str, ...] = ()  # patterns of those that stay wide,
    first_blocks: float = 0  # and blocks from both ends of the model, as in `Rule`
    last_blocks: float = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that a target cannot express."""

    place: str  # in the recipe, or "" for the recipe as a whole
    key: str  # of the cast in that place, or of the recipe
    why: str  # the value in the recipe, and what the target has

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place not in ("", self.key) else ""
        return f"{where}{self.why}"


class Refused(UserError):
    """A recipe that a target cannot express."""


def outside_products(recipe: Recipe, target: str) -> list[Refusal]:
    """What no target expresses: state, gradients on the wire, rules with casts, facts unknown here."""
    plain = recipe_facts(Recipe.from_dict({"compute": recipe.compute}))
    found = [
        Refusal(key, key, f"{key} = {value}, and {target} does not set it")
        for key, value in recipe_facts(recipe).items()
        if key not in _HANDLED and not key.startswith("rule ")
        if value not in (plain.get(key, recipe.compute), NONE)
    ]
    if recipe.saved != "input" and not reuses("wgrad.x", recipe.casts, recipe.saved):
        why = f"saved = {cast_text(recipe.saved)}, but {target} makes wgrad.x of the input itself"
        found.append(Refusal("saved", "saved", why))
    wide = [rule for rule in recipe.rules if is_wide_rule(rule, recipe)]
    if any(rule.is_for_all for rule in wide):
        found.append(Refusal("", "rule", "a [[rule]] that keeps every layer wide; leave the tool out"))
    for key in ("first_blocks", "last_blocks"):
        if sum(bool(getattr(rule, key)) for rule in wide) > 1:
            found.append(Refusal("", key, f"two rules with {key}, where {target} has one"))
    for rule in recipe.rules:
        clock = next((k.replace("_decay", "") for k in _CLOCK if getattr(rule, k)), "")
        why = f"[[rule]] {clock}, but a configuration of {target} holds for the whole run"
        if not clock:
            why = f"[[rule]] with other casts, but {target} gets one set of casts for all layers"
        found += [Refusal("", clock or "rule", why)] if rule not in wide else []
    return found


def cast_refusals(place: str, c: Cast, said: Sequence[Cast], target: str) -> list[Refusal]:
    """Refusals of a cast that a target cannot express: the keys in which the nearest differs."""
    if c in said:
        return []
    if c.function:
        why = f"{c.name}, a custom function, which {target} cannot call"
        return [Refusal(place, "function", why)]

    def distance(other: Cast) -> tuple[bool, bool, int]:
        """How far a cast is: first by its element, then by what shares a scale."""
        keys = _differing(c, other)
        return "element" in keys, "block" in keys, len(keys)

    nearest = min([other for other in said if other.is_scaled == c.is_scaled] or said, key=distance)
    return [
        Refusal(place, key, f"{key} = {_shown(key, c)}, where {target} has {_shown(key, nearest)}")
        for key in _differing(c, nearest)
    ]


def unlike(
    key: str, values: Mapping[str, object], groups: Mapping[str, Sequence[str]], rule: str
) -> list[Refusal]:
    """Refusals of groups whose places need one value; `rule` says so of the target."""
    found = []
    for place, group in groups.items():
        different = dict.fromkeys(values[p] for p in group if p in values)
        if len(different) > 1:
            why = f"{key} = {' and '.join(map(str, different))} in {', '.join(group)}; {rule}"
            found.append(Refusal(place, key, why))
    return found


def _differing(c: Cast, other: Cast) -> list[str]:
    """The keys that differ, without those that follow from another one."""
    others = c.defaults() | other.values()
    found = [key for key, value in c.values().items() if value != others[key]]
    follow = {"scale": "scale_rule", "candidates": "choose", "hadamard": "signs"}
    return [n for n in found if n not in {follow.get(key) for key in found}] or ["name"]


def _shown(key: str, c: Cast) -> str:
    value = key_value(key, c.values().get(key))
    return toml_value(value) if value or value is False else "none"


def narrowed(recipe: Recipe, start: str | None) -> tuple[Recipe, Layers]:
    """The recipe with the casts of its narrow modules for all, and which layers these and the wide ones are.

    If the recipe is wide but for its first rule, which is of modules alone, and all patterns of these begin
    with `start`, it gets the casts of this rule, and they are `only`. Rules that keep layers wide are merged
    as long as each sets different ends of the model; `outside_products` refuses the rest.
    """
    first, *rest = recipe.rules or (Rule(places={}),)
    is_by_name = first.modules and first == Rule(places=first.casts, modules=first.modules)
    is_rest_wide = {recipe.casts[place] for place in GEMM_PLACES} == {make_cast(recipe.compute)}
    fits = start is not None and all(pattern.startswith(start) for pattern in first.modules)
    only: tuple[str, ...] = ()
    if is_by_name and is_rest_wide and fits and not is_wide_rule(first, recipe):
        recipe = replace(recipe, places={**recipe.places, **first.places}, rules=tuple(rest))
        only = first.modules
    wide = [rule for rule in recipe.rules if is_wide_rule(rule, recipe)]
    modules = tuple(dict.fromkeys(m for rule in wide for m in rule.modules))
    first_blocks, last_blocks = (
        next(filter(None, (getattr(rule, key) for rule in wide)), 0)
        for key in ("first_blocks", "last_blocks")
    )
    return recipe, Layers(only, modules, first_blocks, last_blocks)

"""What another tool cannot express of a recipe, key by key.

A tool is described by tables of casts, and an operand must equal one of them in every field. So a key that is
new in recipes is refused for every tool until its meaning there is written down. The same holds for a
recipe's other facts: those that no GEMM sees are listed here, any other must be at its default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import NONE, cast_text, key_value, recipe_facts, wide_and_other_rules
from narrowgauge.recipes.places import GEMM_PLACES, GEMMS, GROUPS
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_value

#: The operands of each GEMM.
OF_GEMM = {gemm: GROUPS[gemm] for gemm in GEMMS}
# The facts of a recipe that a target handles, and those that affect no value.
_HANDLED = (*GEMM_PLACES, "compute", "keep", "saved", "gather", "offload")
_CLOCK = ("from_step", "from_share", "from_decay", "until_step", "until_share", "until_decay")


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


def refused(recipe: Recipe, target: str, refusals: Sequence[Refusal]) -> Refused:
    """The error that lists what a target cannot express."""
    said: dict[str, list[str]] = {}
    for r in refusals:  # a reason shared by several places is listed once
        said.setdefault(r.why, []).append(r.place)
    parts = []
    for why, places in said.items():
        named = ", ".join(dict.fromkeys(p for p in places if p and not why.startswith(f"{p} =")))
        parts.append(f"{named}: {why}" if named else why)
    return Refused(
        f"recipe {recipe.name!r} cannot be written for {target}: {'; '.join(parts)}; change these keys in a "
        "copy of the recipe, or name another target"
    )


def outside_products(recipe: Recipe, target: str) -> list[Refusal]:
    """What no target expresses: state, gradients on the wire, rules, and every fact that is unknown here."""
    plain = recipe_facts(Recipe.from_dict({"compute": recipe.compute}))
    found = [
        Refusal(key, key, f"{key} = {value}, and {target} does not set it")
        for key, value in recipe_facts(recipe).items()
        if key not in _HANDLED and not key.startswith("rule ")
        if value not in (plain.get(key, recipe.compute), NONE)
    ]
    x, saved = recipe.casts["wgrad.x"], recipe.saved
    # The same operand from the values of fprop.x as from the input: the same cast, on no axis.
    is_same = x.of == "fprop.x" or (x == recipe.casts["fprop.x"] and x.ignores_axis and not x.is_random)
    if isinstance(saved, Cast) or (saved == "operand" and not is_same):
        why = f"saved = {cast_text(saved)}, but {target} makes wgrad.x of the input itself"
        found.append(Refusal("saved", "saved", why))
    return found + _other_rules(recipe, target)


def _other_rules(recipe: Recipe, target: str) -> list[Refusal]:
    """Refusals of rules that do more than keep layers in `compute`."""
    wide, other = wide_and_other_rules(recipe)
    found = []
    if any(rule.is_for_all for rule in wide):
        found.append(("rule", "a [[rule]] that keeps every layer wide; leave the tool out"))
    for key in ("first_blocks", "last_blocks"):
        if sum(bool(getattr(rule, key)) for rule in wide) > 1:
            found.append((key, f"two rules with {key}, where {target} has one"))
    for rule in other:
        clock = next((k.replace("_decay", "") for k in _CLOCK if getattr(rule, k)), "")
        timed = f"[[rule]] {clock}, but a configuration of {target} holds for the whole run"
        why = f"[[rule]] with other casts, but {target} gets one set of casts for all layers"
        found.append((clock, timed) if clock else ("rule", why))
    return [Refusal("", key, why) for key, why in found]


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

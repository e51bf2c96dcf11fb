"""What another tool cannot express of a recipe, key by key.

A tool is described by tables of casts, and an operand must equal one of them in every field. So a key that is
new in recipes is refused for every tool until its meaning there is written down. The same holds for a
recipe's fields: those that no GEMM sees are listed here, any other must be at its default.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.attention_places import is_wide
from narrowgauge.recipes.describe import (
    WORDS,
    cast_text,
    default_of,
    key_value,
    wide_and_other_rules,
)
from narrowgauge.recipes.places import GEMM_PLACES, STATE_PLACES, WIDE_STATE
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_value

# Fields of a recipe that a target handles, and those that affect no value.
_OF_PRODUCTS = ("casts", "attention", "rules", "compute", "state", "saved")
_NO_NUMBERS = (*WORDS, "gather", "offload")
_CLOCK = ("from_step", "from_share", "from_decay", "until_step", "until_share", "until_decay")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that a target cannot express.

    Attributes:
        place: The place in the recipe, or "" for the recipe as a whole.
        key: The key: of the cast in that place, or of the recipe.
        why: The value in the recipe, and what the target has.
    """

    place: str
    key: str
    why: str

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
    """What no target expresses: state, gradients on the wire, rules, and every field that is unknown here."""
    products = {p: c for p, c in recipe.casts.items() if p in GEMM_PLACES}
    unset: Mapping[str, Mapping[str, Cast | None]] = {
        "state": {p: c for p, c in recipe.state.items() if p not in STATE_PLACES or c != WIDE_STATE[p]},
        "it": {p: c for p, c in recipe.casts.items() if p not in products and c != make_cast(recipe.compute)},
        "attention": {p: c for p, c in recipe.attention.items() if not is_wide(c, recipe.compute)},
    }
    found = [
        Refusal(place, place, f"{place} = {cast_text(c)}, and {target} does not set {what}")
        for what, casts in unset.items()
        for place, c in casts.items()
    ]
    found += [
        Refusal(place, place, f"{place} = {c.name}, a custom function, which {target} cannot call")
        for casts in (recipe.casts, *(rule.casts for rule in recipe.rules))
        for place, c in casts.items()
        if c.function
    ]
    x, saved = recipe.casts["wgrad.x"], recipe.saved
    # The same operand from the values of fprop.x as from the input: the same cast, on no axis.
    is_same = x.of == "fprop.x" or (x == recipe.casts["fprop.x"] and x.ignores_axis and not x.is_random)
    if isinstance(saved, Cast) or (saved == "operand" and not is_same):
        why = f"saved = {cast_text(saved)}, but {target} makes wgrad.x of the input itself"
        found.append(Refusal("saved", "saved", why))
    for f in fields(recipe):
        value = getattr(recipe, f.name)
        if f.name not in (*_OF_PRODUCTS, *_NO_NUMBERS) and value != default_of(recipe, f.name):
            said = cast_text(value) if isinstance(value, Cast) else str(value)
            found.append(Refusal(f.name, f.name, f"{f.name} = {said}, and {target} does not set it"))
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
        if clock := next((k.replace("_decay", "") for k in _CLOCK if getattr(rule, k)), ""):
            found.append(
                (clock, f"[[rule]] {clock}, but a configuration of {target} holds for the whole run")
            )
        else:
            why = f"[[rule]] with other casts, but {target} gets one set of casts for all layers"
            found.append(("rule", why))
    return [Refusal("", key, why) for key, why in found]


def cast_refusals(place: str, c: Cast, said: Iterable[Cast], target: str) -> list[Refusal]:
    """Refusals of a cast that a target cannot express: the keys in which the nearest differs."""
    casts = list(said)
    if c in casts:
        return []

    def distance(other: Cast) -> tuple[bool, bool, int]:
        """How far a cast is: first by its element, then by what shares a scale."""
        keys = _differing(c, other)
        return "element" in keys, "block" in keys, len(keys)

    nearest = min([other for other in casts if other.is_scaled == c.is_scaled] or casts, key=distance)
    return [
        Refusal(place, key, f"{key} = {_shown(key, c)}, where {target} has {_shown(key, nearest)}")
        for key in _differing(c, nearest)
    ]


def _differing(c: Cast, other: Cast) -> list[str]:
    """The keys that differ, without those that follow from another one."""
    others = c.defaults() | other.values()
    found = [key for key, value in c.values().items() if value != others[key]]
    follow = {"scale": "scale_rule", "candidates": "choose", "hadamard": "signs"}
    return [n for n in found if n not in {follow.get(key) for key in found}] or ["name"]


def _shown(key: str, c: Cast) -> str:
    value = key_value(key, c.values().get(key))
    return toml_value(value) if value or value is False else "none"

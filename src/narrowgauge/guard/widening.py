"""What the guard may widen under `guard.spike = "raise"`, and to what.

A GEMM operand is widened to `guard.raise_to`, or to the recipe's `compute` format. Two places are widened
together if they depend on each other:

    shared values        both GEMMs see one tensor in one cast, so the gauges read it once (`fprop.w`)
    one transform        a Hadamard transform cancels in a GEMM only if both operands have it
    kept channels        one GEMM of both in their other cast (`keep_cast`)

State at rest (`weight`, `master`, `grad`, `m`, `v`) is widened to fp32: it is read, changed and written again
in each step, and what a cast loses there is lost in all later steps.
"""

from narrowgauge.guard.rules import GuardRules
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import GEMM_PLACES, STATE_PLACES, Recipe, Rule
from narrowgauge.recipes.parse import casts_from
from narrowgauge.recipes.places import SEEN_BEFORE
from narrowgauge.system.errors import UserError


def require_raising(recipe: Recipe, rules: GuardRules, gauges_every: int) -> None:
    """Refuse a guard that could not find a place, or not widen it."""
    if not gauges_every:
        raise UserError(
            'guard.spike = "raise" finds the place that broke by its gauges, and this run has none; set '
            "--gauges.every 100 (and leave training.compile off), or choose another guard.spike"
        )
    try:
        to = casts_from("fprop.x", rules.raise_to or recipe.compute)["fprop.x"]
    except UserError as error:
        raise UserError(f"guard.raise_to: {error}") from None
    for place, cast in recipe.casts.items():
        if not cast.of and cast.name != recipe.compute and to.element.bits < cast.element.bits:
            raise UserError(
                f"guard.raise_to = {rules.raise_to!r} is narrower than {place} = {cast.name!r} of recipe "
                f"{recipe.name!r}, and would lower it; name a wider cast, such as {recipe.compute}"
            )
    for place in (*GEMM_PLACES, *STATE_PLACES):
        recipe.with_rules([rule_for(recipe, place, rules.raise_to)])


def rule_for(recipe: Recipe, place: str, to: str, layers: tuple[str, ...] = (), first: int = 0) -> Rule:
    """The rule that widens a place of some layers from step `first` on."""
    casts, state = dict[str, Cast](), dict[str, Cast | None]()
    if place in STATE_PLACES:
        state = {place: make_cast("fp32"), **({"master": None} if place == "weight" else {})}
        if place == "master" and recipe.state["master"] is None:
            state = {}
    else:
        casts = dict.fromkeys(places_with(recipe, place), make_cast(to or recipe.compute))
    return Rule(casts=casts, state=state, modules=layers, from_step=first)


def places_with(recipe: Recipe, place: str) -> tuple[str, ...]:
    """The operands that are widened together with a given one, including itself."""
    found, casts = {place}, recipe.casts
    for _ in GEMM_PLACES:  # until nothing is added
        for later, earlier in SEEN_BEFORE.items():
            cast = casts[later]
            is_same = cast == casts[earlier] and cast.ignores_axis and not cast.is_random
            if (is_same or cast.of) and {later, earlier} & found:
                found |= {later, earlier}
        for a, b in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
            if (casts[a].hadamard or (casts[a].keep_cast and casts[b].keep_cast)) and {
                a,
                b,
            } & found:
                found |= {a, b}
    return tuple(p for p in GEMM_PLACES if p in found)

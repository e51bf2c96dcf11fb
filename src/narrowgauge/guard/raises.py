"""The places that the guard has widened in a run under `guard.spike = "raise"`.

A `Raise` is a place of some layers, in another cast from a step on. The checkpoint keeps them, so that a
resume has the same recipe: that of the configuration plus one rule for each raise. Rules that change state
apply to the values that the step finds (`Recipe.at_rest`).

A GEMM operand is widened to `guard.raise_to`, or to the recipe's `compute` format. Two places are widened
together if they depend on each other:

    shared values        both GEMMs see one tensor in one cast, so the gauges read it once (`fprop.w`)
    one transform        a Hadamard transform cancels in a GEMM only if both operands have it
    kept channels        one GEMM of both in their other cast (`keep_cast`)

State at rest (`weight`, `master`, `grad`, `m`, `v`) is widened to fp32: it is read, changed and written again
in each step, and what a cast loses there is lost in all later steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import GEMM_PLACES, STATE_PLACES, Recipe, Rule
from narrowgauge.recipes.parse import cast_in
from narrowgauge.recipes.places import SEEN_BEFORE, Moment
from narrowgauge.recipes.recipe_rules import have_equal_values
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_value


@dataclass(frozen=True)
class Raise:
    """A place that the guard has widened."""

    place: str  # the place whose gauges broke; `places_with` determines what is widened with it
    layers: tuple[str, ...]  # the names of the layers
    before: str  # the name of the cast that broke
    to: str  # the name of its new cast
    from_step: int  # the first optimizer step in which it holds
    reason: str = ""  # the observation, in words

    def rule(self, recipe: Recipe) -> Rule:
        """The corresponding rule."""
        places = dict[str, Cast | None]()
        if not self.is_state:
            places |= dict.fromkeys(places_with(recipe, self.place), make_cast(self.to or recipe.compute))
        elif self.place != "master" or recipe.state["master"] is not None:
            places |= {self.place: make_cast("fp32"), **({"master": None} if self.place == "weight" else {})}
        return Rule(places=places, modules=self.layers, start=Moment(self.from_step))

    @property
    def is_state(self) -> bool:
        """Whether it concerns state at rest rather than a GEMM operand."""
        return self.place in STATE_PLACES

    @property
    def event(self) -> dict[str, Any]:
        """Its event in the metrics."""
        where = {"place": self.place, "layers": list(self.layers), "from": self.before, "to": self.to}
        return {"event": "raise", "step": self.from_step, **where, "reason": self.reason}

    def toml(self, recipe: Recipe) -> str:
        """The same as a `[[rule]]` of a recipe file."""
        rule = self.rule(recipe)
        lines = ["[[rule]]", f"modules = {toml_value(self.layers)}", f"from_step = {self.from_step}"]
        casts = {place: "none" if cast is None else cast.name for place, cast in rule.places.items()}
        lines += [f"{place} = {toml_value(cast)}" for place, cast in casts.items()]
        return "\n".join(lines) + "\n"


def raises_of(state: Mapping[str, Any]) -> list[Raise]:
    """The raises in the JSON state of a checkpoint."""
    saved = state.get("guard", {}).get("raised", ())
    return [Raise(**one | {"layers": tuple(one["layers"])}) for one in saved]


def require_raising(recipe: Recipe, raise_to: str, gauges_every: int) -> None:
    """Refuse a guard that could not find a place, or not widen it."""
    if not gauges_every:
        raise UserError(
            'guard.spike = "raise" finds the place that broke by its gauges, and this run has none; set '
            "--gauges.every 100 (and leave training.compile off), or choose another guard.spike"
        )
    try:
        to = cast_in("fprop.x", raise_to or recipe.compute)
    except UserError as error:
        raise UserError(f"guard.raise_to: {error}") from None
    for place, cast in recipe.casts.items():
        if not cast.of and cast.name != recipe.compute and to.element.bits < cast.element.bits:
            raise UserError(
                f"guard.raise_to = {raise_to!r} is narrower than {place} = {cast.name!r} of recipe "
                f"{recipe.name!r}, and would lower it; name a wider cast, such as {recipe.compute}"
            )
    for place in (*GEMM_PLACES, *STATE_PLACES):
        recipe.with_rules([Raise(place, (), "", raise_to, 0).rule(recipe)])


def places_with(recipe: Recipe, place: str) -> tuple[str, ...]:
    """The operands that are widened together with a given one, including itself."""
    found, casts = {place}, recipe.casts
    tied = [{a, b} for b, a in SEEN_BEFORE.items() if casts[b].of or have_equal_values(casts, a, b)]
    for a, b in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
        if casts[a].hadamard or (casts[a].keep_cast and casts[b].keep_cast):
            tied.append({a, b})
    for _ in GEMM_PLACES:  # until nothing is added
        found.update(*(pair for pair in tied if pair & found))
    return tuple(p for p in GEMM_PLACES if p in found)

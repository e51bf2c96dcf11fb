"""The places that the guard has widened in a run: kept in the checkpoint, so that a resume has the same
recipe.

A `Raise` is a place of some layers, in another cast from a step on. The recipe in force in a step is that of
the configuration plus one rule for each raise; rules that change state apply to the values that the step
finds (`Recipe.at_rest`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.guard.widening import rule_for
from narrowgauge.recipes import STATE_PLACES, Recipe, Rule
from narrowgauge.system.toml_text import toml_value


@dataclass(frozen=True)
class Raise:
    """A place that the guard has widened."""

    place: str  # the place whose gauges broke; `widening` determines what is widened with it
    layers: tuple[str, ...]  # the names of the layers
    before: str  # the name of the cast that broke
    to: str  # the name of its new cast
    from_step: int  # the first optimizer step in which it holds
    reason: str = ""  # the observation, in words

    def rule(self, recipe: Recipe) -> Rule:
        """The corresponding rule."""
        return rule_for(recipe, self.place, self.to, self.layers, self.from_step)

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
        state = {place: "none" if cast is None else cast.name for place, cast in rule.state.items()}
        casts = dict.fromkeys(rule.casts, self.to or recipe.compute)
        lines += [f"{place} = {toml_value(cast)}" for place, cast in (casts | state).items()]
        return "\n".join(lines) + "\n"


def raises_of(state: Mapping[str, Any]) -> list[Raise]:
    """The raises in the JSON state of a checkpoint."""
    saved = state.get("guard", {}).get("raised", ())
    return [Raise(**one | {"layers": tuple(one["layers"])}) for one in saved]

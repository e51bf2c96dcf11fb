"""The places that the guard has widened in a run: kept in the checkpoint, so that a resume has the same
recipe.

A `Raise` is a place of some layers, in another cast from a step on. The recipe in force in a step is that of
the configuration plus one rule for each raise; rules that change state apply to the values that the step
finds (`Recipe.at_rest`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.guard.widening import rule_for
from narrowgauge.recipes import STATE_PLACES, Recipe, Rule
from narrowgauge.toml_text import toml_value


@dataclass(frozen=True)
class Raise:
    """A place that the guard has widened.

    Attributes:
        place: The place whose gauges broke; `widening` determines what is widened with it.
        layers: The names of the layers.
        before: The name of the cast that broke.
        to: The name of its new cast.
        from_step: The first optimizer step in which it holds.
        until_step: The first one in which it no longer holds; 0 for none.
        harmless: The share that the cast may lose in these layers without harm.
        reason: The observation, in words.
    """

    place: str
    layers: tuple[str, ...]
    before: str
    to: str
    from_step: int
    until_step: int = 0
    harmless: float = 0.0
    reason: str = ""

    def rule(self, recipe: Recipe) -> Rule:
        """The corresponding rule."""
        return rule_for(recipe, self.place, self.to, self.layers, self.from_step, self.until_step)

    def holds(self, step: int) -> bool:
        """Whether it holds in an optimizer step."""
        return step >= self.from_step and (not self.until_step or step < self.until_step)

    @property
    def is_state(self) -> bool:
        """Whether it concerns state at rest rather than a GEMM operand."""
        return self.place in STATE_PLACES

    def event(self, word: str, step: int) -> dict[str, Any]:
        """Its event in the metrics: "raise", or "lower" with the casts swapped."""
        casts = (self.before, self.to) if word == "raise" else (self.to, self.before)
        fields = {"place": self.place, "layers": list(self.layers), "from": casts[0], "to": casts[1]}
        until = {"until": self.until_step or None} if word == "raise" else {}
        return {"event": word, "step": step, **fields, **until, "reason": self.reason}

    def toml(self, recipe: Recipe) -> str:
        """The same as a `[[rule]]` of a recipe file."""
        rule = self.rule(recipe)
        lines = ["[[rule]]", f"modules = {toml_value(self.layers)}", f"from_step = {self.from_step}"]
        lines += [f"until_step = {self.until_step}"] if self.until_step else []
        state = {place: "none" if cast is None else cast.name for place, cast in rule.state.items()}
        casts = dict.fromkeys(rule.casts, self.to or recipe.compute)
        lines += [f"{place} = {toml_value(cast)}" for place, cast in (casts | state).items()]
        return "\n".join(lines) + "\n"


def raises_of(state: Mapping[str, Any]) -> list[Raise]:
    """The raises in the JSON state of a checkpoint; empty for an older version."""
    return read_raises(state.get("guard", {}).get("raised", ()))


def read_raises(saved: Iterable[Mapping[str, Any]]) -> list[Raise]:
    """The raises that `write_raises` wrote."""
    return [Raise(**{**fields, "layers": tuple(fields["layers"])}) for fields in saved]


def write_raises(raises: Iterable[Raise]) -> list[dict[str, Any]]:
    """Raises as JSON."""
    return [{**asdict(r), "layers": list(r.layers)} for r in raises]

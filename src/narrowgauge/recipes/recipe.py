"""A recipe: the number format of each tensor of a training step, as data.

A linear layer does three GEMMs per step, each with two operands. Legend: M tokens, K inputs, N outputs.

    fprop   x_MK  @ w_NK.T  -> y_MN      places fprop.x,  fprop.w     contracts K
    dgrad   dy_MN @ w_NK    -> dx_MK     places dgrad.dy, dgrad.w     contracts N
    wgrad   dy_MN.T @ x_MK  -> dw_NK     places wgrad.dy, wgrad.x     contracts M

A recipe puts a `Cast` in each of these places and in attention's (`places.py`), and names
the format of everything that is not narrow (`compute`). A `Rule` puts other casts into some places of some
layers, or from some time on: both layers that are kept wide and a run that finishes in high precision are
rules. Later rules win.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.quantization import Cast
from narrowgauge.recipes.parse import fields_of, names_from, recipe_fields, table_text
from narrowgauge.recipes.places import (
    ATTENTION_PLACES,
    FP32,
    GEMM_PLACES,
    GEMMS,
    GRADIENT_PLACES,
    IN_FP32,
    SEEN_BEFORE,
    UNSET,
    Places,
    Rule,
    is_wide,
    values_of,
    wide_operands,
)
from narrowgauge.recipes.recipe_rules import fitting_gather, require_recipe, reuses, weight_operands
from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import parse_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Places):
    """A number format for every place (`places.py`).

    Attributes:
        name: The name of the recipe.
        title: A one-line description.
        source: The paper, specification or library that the recipe follows.
        compute: "bf16", "fp16" or "fp32": GEMM results, and everything that the recipe does not narrow.
        saved: What is kept of the input for the backward pass: "input" (as it came), "operand" (the values
            of fprop.x, in the bytes of their format), or a cast.
        offload: The state places that are kept in host memory while a GPU computes.
        rules: Other casts in some layers or from some time on; later ones win.
        text: The TOML that the recipe was read from.
    """

    name: str
    title: str
    source: str
    compute: str
    saved: str | Cast = "input"
    offload: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        require_recipe(self)

    @classmethod
    def from_toml(cls, text: str, where: str) -> "Recipe":
        """The recipe that the text of a TOML file describes; `where` names the file in errors.

        Raises:
            UserError: The TOML is broken, a key or cast is unknown, or a value has the wrong type.
        """
        table = parse_toml(text, f"recipe {where}")
        try:
            return cls(**fields_of(table, where, Path(where).stem), text=text)
        except UserError as error:
            said = str(error).removeprefix(f"recipe {table.get('name', Path(where).stem)!r}: ")
            raise UserError(f"recipe {where}: {said}") from None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], name: str = "own") -> "Recipe":
        """The recipe that a dictionary describes, with the keys of a recipe's file.

            Recipe.from_dict({"fprop": "mxfp4", "keep": {"modules": ["head"]}})

        Args:
            table: The keys of the file; `"fprop.x"` is the same as `x` in the table `fprop`. A `Format` may
                stand where a cast does. Registered formats that it names become part of its text.
            name: Its name, unless the table has one.

        Returns:
            The recipe; its `text` is the file, which a run directory keeps.
        """
        if not isinstance(table, Mapping):
            raise UserError(f"a recipe from {type(table).__name__}, but from_dict takes a dictionary")
        return cls.from_toml(table_text({"name": name, **table}), str(table.get("name", name)))

    def __repr__(self) -> str:
        """Two lines: the title, and the casts of operands by name; `text` has every key."""
        casts = {place: c.of or c.name for place, c in self.casts.items()}
        gemms = {
            gemm: [f"{p.partition('.')[2]}={c}" for p, c in casts.items() if p.startswith(gemm)]
            for gemm in GEMMS
        }
        operands = ", ".join(f"{gemm}({', '.join(of_gemm)})" for gemm, of_gemm in gemms.items())
        rules = f", {len(self.rules)} rule{'s'[: len(self.rules) > 1]}" if self.rules else ""
        return f"<Recipe {self.name!r}: {self.title}\n {operands}, compute={self.compute}{rules}>"

    @property
    def is_narrow(self) -> bool:
        """Whether any operand of a GEMM or of attention is narrower than `compute`."""
        return any(c.name != self.compute for _, c in self.ever_in(GEMM_PLACES)) or self.narrows_attention

    @property
    def narrows_attention(self) -> bool:
        """Whether any place of attention is not in `compute`, in any layer at any time."""
        return any(not is_wide(cast, self.compute) for _, cast in self.ever_in(ATTENTION_PLACES))

    def ever_in(self, places: Iterable[str]) -> Iterator[tuple[str, Cast]]:
        """Some places, with every cast that they have in any layer at any time."""
        for of in (self, *self.rules):
            yield from ((place, cast) for place in places if (cast := of.places.get(place)) is not None)

    def for_layer(self, names: Sequence[tuple[str, int | None]], blocks: int) -> "Recipe":
        """The recipe of one layer: rules that select it are merged in, those that wait for a step remain.

        Args:
            names: The names of the layer (two, if the model holds it twice), each with the number of its
                block, if it is in one.
            blocks: The number of blocks.
        """
        rules = [r for r in self.rules if any(r.selects(name, block, blocks) for name, block in names)]
        final: dict[str, Cast | None] = {}  # what no earlier rule changes
        waiting: list[Rule] = []
        for rule in reversed(rules):
            left = {place: cast for place, cast in rule.places.items() if place not in final}
            if not rule.is_timed:
                final |= left
            elif left:
                waiting.insert(0, Rule(places=left, start=rule.start, until=rule.until))
        if any(rule.keeps_state for rule in rules):
            kept = {place: IN_FP32[place] for place in ("weight", "master", "grad", "reduce")}
            final = kept | final
        return self._with(places={**self.places, **final}, rules=tuple(waiting))

    def at(self, step: int, steps: int | None, decay: int | None) -> Places:
        """The casts of every layer in one step; rules that select layers do not count (`for_layer`)."""
        places = dict(self.places)
        for rule in self.rules:
            if rule.is_for_all and rule.holds(step, steps, decay):
                places |= rule.places
        return Places(places=places)

    def _with(self, **changes: Any) -> "Recipe":
        """This recipe with other fields; `gather` changes to what still fits."""
        changed = Places(places=changes.get("places", self.places))
        rules = [rule.places for rule in changes.get("rules", self.rules) if rule.is_for_all]
        gather = fitting_gather(changed["gather"], weight_operands(changed.places, *rules), changed["weight"])
        return replace(self, **changes | {"places": {**changed.places, "gather": gather}})

    def in_high_precision(self, modules: Sequence[str] = ()) -> "Recipe":
        """This recipe with every place of some modules (none named: all) in `compute`, at any time."""
        kept = Rule(places=wide_operands(self.compute), keeps_state=True, modules=tuple(modules))
        return self._with(rules=(*self.rules, kept))

    def with_rules(self, rules: Sequence[Rule]) -> "Recipe":
        """This recipe with more rules, which win over its existing ones."""
        return self._with(rules=(*self.rules, *rules)) if rules else self

    @property
    def times_state(self) -> bool:
        """Whether a rule changes the storage of state from some time on."""
        return any(rule.state and rule.is_timed for rule in self.rules)

    def at_rest(self, step: int, steps: int | None, decay: int | None = None) -> "Recipe":
        """This recipe with the state that an optimizer step finds, now without a clock (`Rule.holds`)."""
        rules: list[Rule] = []
        for rule in self.rules:
            state = rule.state if rule.is_timed else {}
            others = {place: cast for place, cast in rule.places.items() if place not in state}
            if others or not state:
                rules.append(replace(rule, places=others))
            if state and rule.holds(step, steps, decay):
                rules.append(replace(rule, places=state, start=UNSET, until=UNSET))
        return self._with(rules=tuple(rules)) if self.times_state else self

    def with_wide_backward(self) -> "Recipe":
        """This recipe with the same forward pass, and a backward pass in fp32 that rounds nothing.

        An operand that the backward pass makes from values of the forward pass is those values as they are;
        any other is the tensor in fp32. So the mean of unbiased roundings is this recipe's gradient.
        """

        def wide(of: Places) -> dict[str, Cast | None]:
            casts = {**self.casts, **of.casts}
            places = {**of.places, **dict.fromkeys((*GEMM_PLACES[2:], *GRADIENT_PLACES), FP32)}
            for place in ("dgrad.w", "wgrad.x"):
                if reuses(place, casts, self.saved) or (place == "wgrad.x" and self.saved == "operand"):
                    places[place] = values_of(SEEN_BEFORE[place])
            return places

        rules = tuple(replace(rule, places=wide(rule)) for rule in self.rules)
        places = wide(self) | {"grad": FP32, "reduce": FP32}
        return self._with(compute="fp32", saved="input", places=places, rules=rules)

    def with_places(self, places: Mapping[str, Any]) -> "Recipe":
        """This recipe with other casts in some places, as in `--recipe.fprop.x bf16`.

        `keep` names the modules that stay wide instead of those that [keep] names; its blocks stay.

        Raises:
            UserError: Unknown place or cast, a cast that the place cannot have, or two incompatible GEMM
                operands.
        """
        casts = {place: value for place, value in places.items() if place != "keep"}
        fields = recipe_fields(casts, self.places)
        changed = replace(self, **fields) if "gather" in casts else self._with(**fields)
        if "keep" not in places:
            return changed
        modules = names_from("keep", places["keep"], 'names such as ["head"], or "none"')
        rules = [replace(rule, modules=()) if rule.keeps_state else rule for rule in changed.rules]
        selected = [r for r in rules if not r.keeps_state or r.first_blocks or r.last_blocks]
        changed = changed._with(rules=tuple(selected))
        return changed.in_high_precision(modules) if modules else changed


#: What stands wherever a recipe goes: a name, the path of a file, the keys of one, or a recipe.
RecipeLike = str | Path | Mapping[str, Any] | Recipe

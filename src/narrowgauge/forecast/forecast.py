"""The forecast of a recipe at a size and a length, its support, and what published laws say.

    gap_percent           of the loss of the bf16 run, with an interval of 90 % for one pair of runs
    gap_nats              the same at the loss that Quartet's law gives for the size and length
    extra_tokens_percent  D' / D - 1, where L(N, D') (1 + gap / 100) = L(N, D): they buy the gap back
    kappa                 the gap at 100 million parameters and 10 billion tokens
    extrapolation         factors beyond the points that support it

A forecast is of a new family, whose level is unknown, unless your own runs are given: they have a
family, which the forecast then shares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from narrowgauge.forecast.atlas import Atlas, read_atlas
from narrowgauge.forecast.fit import Laws, fit_laws
from narrowgauge.forecast.hints import hints
from narrowgauge.forecast.law import Predicted
from narrowgauge.forecast.parts import Described, described, observations
from narrowgauge.forecast.published import loss_of, published_laws, tokens_for
from narrowgauge.forecast.setting import FORWARD, NEW, Observed, Setting
from narrowgauge.forecast.support import Extrapolation, extrapolation, nearest, refusal, similar_to
from narrowgauge.recipes import Recipe
from narrowgauge.system.t_interval import Interval

OWN = "your runs"
_NEAREST = 5
_WORDS_OF_FOUR_BITS = 4
#: Parameters and tokens from which a run was published that diverged with all linear layers in 4 bits.
_DIVERGED_AT = (8e9, 1e12)


@dataclass(frozen=True, slots=True)
class Near:
    """A point near a forecast: what was trained, and where that is published."""

    recipe: str
    params: float
    tokens: float
    gap_percent: float
    source: str
    locator: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of one recipe; intervals are None where it is refused.

    Attributes:
        recipe: The recipe's name.
        params: Parameters without embeddings.
        tokens: Tokens of training.
        gap_percent: The gap in percent of the loss of the bf16 run.
        gap_nats: The gap in nats per token.
        extra_tokens_percent: The tokens that buy the gap back; an infinite end has no such number.
        extrapolation: How far the setting lies beyond its support.
        kappa: The gap in percent at 100 million parameters and 10 billion tokens.
        points: The points that resemble the recipe.
        own_points: The points of the recipe itself.
        nearest: The nearest points.
        published: The gap in nats that each published law gives; None where it does not apply.
        divergence: What is known of divergence at such a setting; "" for nothing.
        refused: Why there is no forecast; None if there is one.
        predicted: The figures behind the intervals; None where it is refused.
        setting: What was forecast.
    """

    recipe: str
    params: float
    tokens: float
    gap_percent: Interval | None
    gap_nats: Interval | None
    extra_tokens_percent: Interval | None
    extrapolation: Extrapolation
    kappa: Interval | None
    points: int
    own_points: int
    nearest: tuple[Near, ...]
    published: Mapping[str, float | None]
    divergence: str
    refused: str | None
    predicted: Predicted | None
    setting: Setting

    def as_json(self) -> dict[str, Any]:
        """The fields for programs; an interval is an object with mean, low and high, or null."""

        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("predicted", "setting", "published"):
            del found[name]
        beyond = asdict(self.extrapolation)
        return {k: v.as_json() if isinstance(v, Interval) else v for k, v in found.items()} | {
            "extrapolation": {name: x if math.isfinite(x) else None for name, x in beyond.items()},
            "nearest": [asdict(near) for near in self.nearest],
            "published_laws_nats": dict(self.published),
            "divergence": self.divergence or None,
        }


class Forecaster:
    """The law of an atlas, and what your runs and probe add to it."""

    def __init__(
        self,
        atlas: Atlas | None = None,
        own: Sequence[Observed] = (),
        probe: Mapping[str, Mapping[str, Any]] | None = None,
        recipes: Mapping[str, Recipe] | None = None,
    ) -> None:
        """Fit the law.

        Args:
            atlas: The points; None for the atlas that ships.
            own: Your points, of the family `OWN`.
            probe: The figures of `probe` by recipe.
            recipes: The recipes that will be asked for, and the probe's.
        """
        self.atlas = read_atlas() if atlas is None else atlas
        self.own = tuple(own)
        known = {name: described(recipe) for name, recipe in (recipes or {}).items()}
        published = _of_shipped() if atlas is None else observations(atlas)
        self.observed = [*published, *self.own]
        law = _law_of_shipped() if atlas is None and not own else fit_laws(self.observed)
        if probe:
            known |= {
                name: described(self.atlas.recipes[name]) for name in probe if name in self.atlas.recipes
            }
            found = hints(law, probe, known, [name for name in (recipes or {}) if name in probe])
            law = fit_laws(self.observed, found) if found else law
        self.law: Laws = law

    def forecast(
        self,
        recipe: Recipe,
        params: float,
        tokens: float,
        name: str = "",
        family: str = "",
        tail: float | None = None,
    ) -> Forecast:
        """The forecast of a recipe at a size and a length.

        Args:
            recipe: The recipe.
            params: Parameters without embeddings.
            tokens: Tokens of training.
            name: The name of the recipe among the points, if it is not its own. The points do not count as
                the recipe's if theirs has other narrow GEMMs or state.
            family: The family of the runs; `OWN` if there are such points, else a new one.
            tail: The share of wide blocks, where the depth of the model makes it another than the recipe's.
        """
        family = family or (OWN if self.own else NEW)
        of_recipe = described(recipe)
        known_as = self._known_as(name or recipe.name, of_recipe)
        setting = of_recipe.setting(known_as, params, tokens, tail, family)
        similar = similar_to(setting.parts, self.observed)
        refused = refusal(setting, similar, of_recipe.beyond)
        predicted = None if refused else self.law.predict(setting)
        gap = None if predicted is None else _interval(predicted)
        kappa = None if predicted is None else _interval(self.law.kappa(setting), noise=False)
        return Forecast(
            recipe=setting.recipe,
            params=params,
            tokens=tokens,
            gap_percent=gap,
            gap_nats=_scaled(gap, loss_of(params, tokens) / 100),
            extra_tokens_percent=None if gap is None else extra_tokens(params, tokens, gap),
            extrapolation=extrapolation(setting, similar) if setting.parts else Extrapolation(1.0, 1.0),
            kappa=kappa,
            points=len(similar),
            own_points=sum(one.setting.recipe == setting.recipe for one in similar),
            nearest=self._nearest(setting, similar),
            published=published_laws(recipe, params, tokens),
            divergence=divergence(of_recipe, setting, recipe),
            refused=refused,
            predicted=predicted,
            setting=setting,
        )

    def _known_as(self, name: str, of_recipe: Described) -> str:
        """The name of a recipe; another one where the atlas has points of a different recipe of this name."""
        if name not in self.atlas.recipes:
            return name
        known = described(self.atlas.recipes[name])
        is_same = (known.parts, known.beyond) == (of_recipe.parts, of_recipe.beyond)
        return name if is_same else f"{name}-changed"

    def _nearest(self, setting: Setting, similar: Sequence[Observed]) -> tuple[Near, ...]:
        places = {id(one): point for one, point in zip(self.observed, self.atlas.points, strict=False)}
        found = []
        for number in nearest(setting, similar, _NEAREST):
            one, s = similar[number], similar[number].setting
            point = places.get(id(one))
            source, locator = (point.source, point.locator) if point else (OWN, "")
            found.append(Near(s.recipe, s.params, s.tokens, one.gap, source, locator))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """The law for programs; `exponent`: of the power law, over the points with narrow forward passes."""
        power = self.law.each[0]
        settings = [one.setting for one in power.observed]
        forward = [s for s in settings if any(part.side == FORWARD for part in s.parts)]
        return {
            "exponent": _normal(*power.exponent(forward or settings)).as_json(),
            "exponent_backward": _normal(*power.coefficient("exponent")).as_json(),
            "curves": [law.curve.name for law in self.law.each],
            "evidence": [law.evidence for law in self.law.each],
            "points": len(settings),
            "families": sorted({s.family for s in settings}),
            "deviations": dict(power.deviations),
        }


def extra_tokens(params: float, tokens: float, gap: Interval) -> Interval:
    """The tokens that buy a gap back, in percent: infinite where no number of them does."""

    def of(percent: float) -> float:
        more = tokens_for(params, loss_of(params, tokens) / (1 + percent / 100))
        return 100 * (more / tokens - 1)

    return Interval(of(gap.mean), of(gap.low), of(gap.high))


def divergence(recipe: Described, setting: Setting, of: Recipe) -> str:
    """What is known of divergence at such a setting, in a sentence; "" for nothing."""
    bits = min(of.casts["fprop.x"].element.bits, of.casts["fprop.w"].element.bits)
    if not any(part.side == FORWARD for part in setting.parts) or bits > _WORDS_OF_FOUR_BITS:
        return ""
    if recipe.tail == 0 and setting.params >= _DIVERGED_AT[0] and setting.tokens >= _DIVERGED_AT[1]:
        return (
            "a 12 B model diverged when every linear layer was in NVFP4 (arXiv 2509.25149); the gap "
            "is that of runs that do not. Keep the last blocks wide"
        )
    return ""


@cache
def _of_shipped() -> list[Observed]:
    return observations(read_atlas())


@cache
def _law_of_shipped() -> Laws:
    return fit_laws(_of_shipped())


def _interval(predicted: Predicted, noise: bool = True) -> Interval:
    low, high = predicted.interval(1.0 if noise else math.inf)
    if predicted.gap == 0:
        low = high = 0.0
    return Interval(predicted.gap, low, high)


def _scaled(interval: Interval | None, factor: float) -> Interval | None:
    if interval is None:
        return None
    return Interval(interval.mean * factor, interval.low * factor, interval.high * factor)


def _normal(mean: float, deviation: float) -> Interval:
    return Interval(mean, mean - 1.645 * deviation, mean + 1.645 * deviation)

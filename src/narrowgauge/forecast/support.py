"""The support of a forecast: the points that resemble a recipe, and how far beyond them a setting lies.

Kin of a recipe are points whose forward GEMM is narrow, as its own is; of a recipe with a wide forward
pass, points with a wide one. The support is the range of their sizes, and of their tokens per parameter. A
setting beyond it is extrapolated by a factor; beyond `MOST` the law has no ground, and the forecast is
refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.forecast.setting import FORWARD, Observed, Part, Setting
from narrowgauge.system.units import human_count

MOST_PARAMS, MOST_LENGTH = 50.0, 10.0  # factors; the largest that was ever checked is 38, of parameters
COARSER = 2.0  # times the noise of the noisiest GEMM with points


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Factors beyond the nearest support; 1 inside it."""

    params: float
    tokens_per_param: float


def similar_to(parts: Sequence[Part], observed: Sequence[Observed]) -> list[Observed]:
    """The points that resemble a recipe of these parts."""
    is_forward = _has_forward(parts)
    return [one for one in observed if one.setting.parts and _has_forward(one.setting.parts) == is_forward]


def extrapolation(setting: Setting, similar: Sequence[Observed]) -> Extrapolation:
    """How far a setting lies beyond the points that resemble it."""
    sizes = [one.setting.params for one in similar]
    lengths = [one.setting.tokens_per_param for one in similar]
    return Extrapolation(_beyond(setting.params, sizes), _beyond(setting.tokens_per_param, lengths))


def refusal(setting: Setting, similar: Sequence[Observed], beyond: str) -> str | None:
    """Why a setting cannot be forecast, in a sentence; None if it can.

    Args:
        setting: The setting.
        similar: The points that resemble its recipe.
        beyond: What the recipe narrows that the law does not describe.
    """
    name = setting.recipe
    if beyond and not any(one.setting.recipe == name for one in similar):
        return (
            f"{name} has {beyond}, of which no published run shows the cost at several sizes; measure "
            f"it with narrowgauge compare --recipes bf16,{name}"
        )
    if not setting.parts:
        return None
    if not similar:
        return (
            f"no point of the atlas resembles {name}; name an atlas with more points, or your runs by --runs"
        )
    if coarse := _coarser(setting, similar):
        return coarse
    for of, words, most, show in (
        ("params", "parameters", MOST_PARAMS, human_count),
        ("tokens_per_param", "tokens per parameter", MOST_LENGTH, "{:,.3g}".format),
    ):
        here, known = getattr(setting, of), [getattr(one.setting, of) for one in similar]
        if (times := _beyond(here, known)) > most:
            return (
                f"{show(here)} {words} are {times:.0f} times beyond the runs that support {name}, "
                f"{show(min(known))} to {show(max(known))}; the law is trusted up to {most:.0f} times: add "
                "runs nearer to it by --runs"
            )
    return None


def nearest(setting: Setting, similar: Sequence[Observed], count: int) -> list[int]:
    """The indices of the nearest of similar points in size and length, the same recipe's first."""

    def distance(one: Observed) -> float:
        apart = abs(math.log(one.setting.params / setting.params))
        apart += abs(math.log(one.setting.tokens_per_param / setting.tokens_per_param))
        return apart + (0 if one.setting.recipe == setting.recipe else 2 + _unlike(one.setting, setting))

    return sorted(range(len(similar)), key=lambda number: distance(similar[number]))[:count]


def _unlike(a: Setting, b: Setting) -> float:
    """How much the noise of two recipes differs, in factors of e."""
    noise = {part.gemm: part.noise for part in a.parts}
    return sum(
        abs(math.log(part.noise / other))
        for part in b.parts
        if part.noise is not None and (other := noise.get(part.gemm)) is not None
    )


def _coarser(setting: Setting, similar: Sequence[Observed]) -> str | None:
    for part in setting.parts:
        noise = [
            p.noise for s in similar for p in s.setting.parts if p.side == part.side and p.noise is not None
        ]
        if part.noise is not None and noise and part.noise > COARSER * max(noise):
            return (
                f"{part.gemm} of {setting.recipe} has {part.noise / max(noise):.1f} times the noise of "
                "the coarsest casts that anyone has published a run of; measure it with narrowgauge compare"
            )
    return None


def _has_forward(parts: Sequence[Part]) -> bool:
    return any(part.side == FORWARD for part in parts)


def _beyond(x: float, known: Sequence[float]) -> float:
    return max(1.0, x / max(known), min(known) / x) if known else math.inf

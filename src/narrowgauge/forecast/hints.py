"""Kappa of a recipe from `probe`: what it adds to a finished model's loss, and what it does to the gradient.

`probe` measures, without training, the loss x_f that a recipe's forward pass adds, and the cosine c of its
gradient. Both rank recipes as training does. Across recipes that were probed on one model,

    ln kappa_fprop = ln x_f + a_f          x_f: nats a token, where its interval leaves out zero
    ln kappa_back  = ln x_b + a_b          x_b = 1 - c^2, the share of the gradient's power that is error

a_f and a_b belong to the model. Recipes of the file whose kappa the points know give them: their mean
difference. So a file needs a recipe with points next to the new one, such as mxfp4 or nvfp4. The variance of
a kappa that is found like this comes from the spread s of such differences, and from what the points leave
unknown of the other recipes, u:

    deviation^2 = s^2 (1 + 1 / n) + mean u^2        n: the recipes with points

s was measured on 16 schemes with known kappas, of which this room's `probe.json` holds the figures
(docs/forecast.md; `experiments/probe_kappa.py` measures it again).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.forecast.fit import Laws
from narrowgauge.forecast.parts import Described
from narrowgauge.forecast.setting import BACKWARD, FORWARD, UNIT_PARAMS, UNIT_TOKENS, Hint, Part
from narrowgauge.system.errors import UserError, words_of

MEASURED = Path(__file__).with_name("probe.json")
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Reading:
    """The logarithm of a figure of one pass of a recipe, and its deviation."""

    log: float
    deviation: float


def read_probe_file(path: Path) -> dict[str, dict[str, Any]]:
    """The figures of each recipe in what `probe --json` printed, or in a run's probe.json.

    Raises:
        UserError: The file cannot be read, or is not of `probe`.
    """
    try:
        recipes = json.loads(path.read_text(encoding="utf-8"))["recipes"]
        return {str(name): dict(figures) for name, figures in recipes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"probe {path} cannot be read: "
            f"{words_of(error) if isinstance(error, OSError) else 'it is not of probe'}; "
            "write one with narrowgauge probe RUN --recipes A,B --json"
        ) from None


@cache
def spreads() -> dict[str, float]:
    """How much ln kappa - ln x deviates between schemes of one model: the measured figure of each pass."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["spread"]
    return {side: float(measured[side]["deviation"]) for side in (FORWARD, BACKWARD)}


def readings(figures: Mapping[str, Any]) -> dict[str, Reading]:
    """What the figures of one recipe show of each pass; a pass whose effect is not resolved is left out."""
    found = {}
    try:
        loss, cosine = figures["loss_increase"], figures["gradient_cosine"]
        mean, low = float(loss["mean"]), float(loss["low"])
        if low > 0:
            found[FORWARD] = Reading(math.log(mean), (mean - low) / mean / _Z95)
        error = 1 - float(cosine["mean"]) ** 2
        if error > 1e-5:
            found[BACKWARD] = Reading(math.log(error), 0.0)
    except (KeyError, TypeError, ValueError):
        return found
    return found


def hints(
    law: Laws,
    probed: Mapping[str, Mapping[str, Any]],
    recipes: Mapping[str, Described],
    wanted: Sequence[str],
) -> list[Hint]:
    """What a probe shows of the parts of some recipes.

    Args:
        law: The law without the probe.
        probed: The figures of each recipe of the probe.
        recipes: The recipes of the probe that are known by name.
        wanted: The recipes of which the probe is asked.
    """
    read = {name: readings(figures) for name, figures in probed.items() if name in recipes}
    seen = {one.setting.recipe for one in law.observed}
    found = []
    for side, deviation in spreads().items():
        for name in wanted:
            if side not in read.get(name, {}):
                continue
            anchors = [other for other in read if other != name and other in seen and side in read[other]]
            known = [
                (kappa.log - read[other][side].log, kappa.deviation)
                for other in anchors
                if (kappa := _kappa(law, other, recipes[other], side)) is not None
            ]
            if not known:
                continue
            reading, count = read[name][side], len(known)
            level = sum(log for log, _ in known) / count
            unknown = sum(u**2 for _, u in known) / count
            variance = deviation**2 * (1 + 1 / count) + unknown + reading.deviation**2
            found += _of_parts(law, name, recipes[name], side, reading.log + level, math.sqrt(variance))
    return found


def _kappa(law: Laws, name: str, recipe: Described, side: str) -> Reading | None:
    """ln of what the parts of one side cost together, and its deviation; None without such parts."""
    terms = _terms(law, name, recipe, side)
    if not terms:
        return None
    total = sum(terms.values())
    deviation = sum(term * law.shift(part, name)[1] for part, term in terms.items()) / total
    return Reading(math.log(total), deviation)


def _of_parts(law: Laws, name: str, recipe: Described, side: str, log: float, deviation: float) -> list[Hint]:
    """The same shift for each part of a side, so that together they cost what the probe shows."""
    terms = _terms(law, name, recipe, side)
    more = log - math.log(sum(terms.values())) if terms else 0.0
    return [Hint(part, name, law.shift(part, name)[0] + more, deviation) for part in terms]


def _terms(law: Laws, name: str, recipe: Described, side: str) -> dict[Part, float]:
    setting = recipe.setting(name, UNIT_PARAMS, UNIT_TOKENS, tail=0.0)
    terms = law.terms(setting)
    return {part: term for part, term in zip(setting.parts, terms, strict=True) if part.side == side}

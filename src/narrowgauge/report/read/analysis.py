"""Reads the results of `probe` and `sensitivity` in a run directory; files of another form are ignored."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Probe:
    """The figures of each recipe, as (mean, low, high); None for values that are not finite."""

    step: int
    figures: Mapping[str, Mapping[str, tuple[float | None, float | None, float | None]]]


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each (layer, place) in a cast, the unit of each place, and the worst places."""

    step: int
    cast: str
    costs: Mapping[tuple[str, str], float]
    units: Mapping[str, str]
    worst: tuple[str, ...]  #: of the forward pass
    worst_backward: tuple[str, ...]
    forks: str = ""  #: how the costs were measured, if by training


def read_probe(path: Path) -> Probe | None:
    """The probe in a file; None if there is none."""
    table = _read(path)
    recipes = table.get("recipes")
    if not isinstance(recipes, Mapping):
        return None
    figures = {
        str(name): {
            str(key): (_number(value.get("mean")), _number(value.get("low")), _number(value.get("high")))
            for key, value in found.items()
            if isinstance(value, Mapping)
        }
        for name, found in recipes.items()
        if isinstance(found, Mapping)
    }
    return Probe(_step(table), figures) if figures else None


def read_costs(path: Path) -> Costs | None:
    """The costs in a file; None if there are none."""
    table = _read(path)
    lines = table.get("layers")
    if not isinstance(lines, list):
        return None
    units: dict[str, str] = {}
    costs: dict[tuple[str, str], float] = {}
    for line in lines:
        if isinstance(line, Mapping) and {"layer", "place", "unit"} <= line.keys():
            cost = _number(line.get("cost"))
            if cost is not None:
                costs[str(line["layer"]), str(line["place"])] = cost
                units[str(line["place"])] = str(line["unit"])
    forward, backward = (_names(table.get(key)) for key in ("worst", "worst_backward"))
    step, cast = _step(table), str(table.get("to", ""))
    forks = str(table.get("forks", ""))
    return Costs(step, cast, costs, units, forward, backward, forks) if costs else None


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, Mapping) else {}


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _step(table: Mapping[str, Any]) -> int:
    step = table.get("step")
    return step if isinstance(step, int) else 0

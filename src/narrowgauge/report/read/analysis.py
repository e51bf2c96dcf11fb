"""Reads what `probe` and `sensitivity` left in a run directory; files of another form are read as nothing."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Probe:
    """The figures of each recipe, as (mean, low, high); None for what is not finite."""

    step: int
    figures: Mapping[str, Mapping[str, tuple[float | None, float | None, float | None]]]


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each (layer, place) in a cast, and the names of the worst."""

    step: int
    cast: str
    costs: Mapping[tuple[str, str], float]
    worst: tuple[str, ...]


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
    costs = {
        (str(line["layer"]), str(line["place"])): cost
        for line in lines
        if isinstance(line, Mapping)
        and {"layer", "place"} <= line.keys()
        and (cost := _number(line.get("cost"))) is not None
    }
    names = table.get("worst")
    worst = tuple(map(str, names)) if isinstance(names, list) else ()
    return Costs(_step(table), str(table.get("to", "")), costs, worst) if costs else None


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

"""Forecasts that were sealed before their outcome was known, and the outcomes as far as they are.

They are the rows of docs/evidence/forecasts.csv, and the forecasts among the predictions of ladder 2. The
commit that added one is its seal. No row changes but for its outcome; a forecast that changes, because the
law or the atlas did, becomes another row. The outcomes of ladder 2 are read from its rows.
"""

import csv
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any

from ladder2 import HERE, ROWS, read_parts
from narrowgauge.forecast import Forecaster, scheme, tail_share
from narrowgauge.recipes import recipe_names
from narrowgauge.system.files import write_whole
from narrowgauge.system.t_interval import Interval
from narrowgauge.trainer.models import count_block_weights
from narrowgauge.trainer.report.verdict.verdict import gap_percent, read_rows
from narrowgauge.trainer.training import make_config
from publish.ladder2 import REFERENCE, tokens_of
from publish.predictions import read_predictions

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"
REGISTRY = EVIDENCE / "forecasts.csv"
PREDICTIONS = HERE / "predictions.md"
LADDER = "ladder 2"
COLUMNS = ("registered", "recipe", "params", "tokens", "low", "mean", "high", "outcome", "source")
#: Settings that had no published gap on the day of registration.
UNPUBLISHED = (
    ("nvfp4", 1e9, 2e10),
    ("nvfp4", 7e9, 2e12),
    ("nvfp4-4over6", 3e9, 6e10),
    ("nvfp4-finish", 3e9, 1e12),
    ("mxfp4", 1e9, 2e10),
    ("mxfp4-amd", 1e9, 2e10),
    ("quartet", 1e9, 1e11),
    ("quartet2", 7e9, 1.4e11),
    ("tetrajet2", 3e9, 6e10),
    ("averis", 2e9, 4e10),
    ("fp4-all", 1e9, 2e10),
    ("mxfp6-e3m2", 1e9, 2e10),
    ("mxfp8", 7e9, 2e12),
    ("fp8-block", 7e9, 2e12),
)
LADDER_SIZE, LADDER_LENGTH = 851_968, 25
Key = tuple[str, float, float]  # recipe, parameters, tokens


@dataclass(frozen=True, slots=True)
class Sealed:
    """A forecast, and what was measured.

    Attributes:
        day: The day of its registration.
        key: Recipe, parameters and tokens.
        gap: The forecast in percent, with its interval of 90 % for one pair of runs.
        pairs: The gap in percent of each pair of runs that was trained; infinite if the recipe diverged.
        source: Where the outcome comes from: `LADDER`, a citation, or "" as long as there is none.
    """

    day: str
    key: Key
    gap: Interval
    pairs: tuple[float, ...]
    source: str

    @property
    def outcome(self) -> float | None:
        """The mean gap of all pairs; None without any."""
        return statistics.fmean(self.pairs) if self.pairs else None


def read_registry() -> list[dict[str, str]]:
    """The rows of the registry."""
    if not REGISTRY.is_file():
        return []
    with REGISTRY.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def register(today: date) -> int:
    """Add each forecast that is new or has changed; returns how many rows were added."""
    rows = read_registry()
    last = {setting_of(row): _figures(row) for row in rows}
    ladder = [(name, float(LADDER_SIZE), float(LADDER_SIZE * LADDER_LENGTH)) for name in recipe_names()]
    wanted = [(*one, LADDER) for one in ladder] + [(*one, "") for one in UNPUBLISHED]
    forecaster, added = Forecaster(), 0
    for name, params, tokens, source in wanted:
        recipe, ours = scheme(name).recipe, {}
        if source:  # the models of ladder 2 have four blocks, and are of the family of the ladder
            ours = {"family": "ladder", "tail": tail_share(recipe, blocks=4)}
        found = forecaster.forecast(recipe, params, tokens, name, **ours)
        if found.gap_percent is None or not found.setting.parts:
            continue
        row = {
            "registered": today.isoformat(),
            "recipe": name,
            "params": f"{params:.0f}",
            "tokens": f"{tokens:.0f}",
            **{end: f"{getattr(found.gap_percent, end):.3f}" for end in ("low", "mean", "high")},
            "outcome": "",
            "source": source,
        }
        if last.get(setting_of(row)) != _figures(row):
            rows.append(row)
            added += 1
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(REGISTRY, text.getvalue())
    return added


def setting_of(row: dict[str, str]) -> Key:
    """What a row of the registry is a forecast of."""
    return row["recipe"], float(row["params"]), float(row["tokens"])


def _figures(row: dict[str, str]) -> tuple[str, str, str]:
    """What a row forecasts."""
    return row["low"], row["mean"], row["high"]


def sealed() -> list[Sealed]:
    """All forecasts: those of the registry, then those among the predictions of ladder 2."""
    gaps, found = _gaps_of_ladder(), []
    for row in read_registry():
        low, mean, high = map(float, _figures(row))
        of_ladder = gaps.get(setting_of(row), ()) if row["source"] == LADDER else ()
        pairs = (float(row["outcome"]),) if row["outcome"] else of_ladder
        found.append(
            Sealed(row["registered"], setting_of(row), Interval(mean, low, high), pairs, row["source"])
        )
    text, parts = PREDICTIONS.read_text(encoding="utf-8"), list(read_parts("stages").values())
    (day,) = re.findall(r"Written on (\S+),", text)
    for one in read_predictions(text):
        if one.forecast is not None:
            key = one.arm, *_size_and_length(parts[one.rung - 1])
            gap = Interval(one.forecast, one.low, one.high)
            found.append(Sealed(day, key, gap, gaps.get(key, ()), LADDER))
    return found


def _gaps_of_ladder() -> dict[Key, tuple[float, ...]]:
    """The gap in percent of each pair of runs of ladder 2; infinite if the arm diverged."""
    found: dict[Key, tuple[float, ...]] = {}
    for name, tables in read_parts("stages").items():
        path = ROWS / "stages" / f"{name}.csv"
        rows = read_rows(path) if path.exists() else []
        base = {row.seed: row.own_loss for row in rows if row.arm == REFERENCE}
        for row in rows:
            if row.arm == REFERENCE or not math.isfinite(base.get(row.seed, math.nan)):
                continue
            gap = gap_percent(row.own_loss, base[row.seed]) if math.isfinite(row.own_loss) else math.inf
            key = row.arm, *_size_and_length(tables)
            found[key] = (*found.get(key, ()), gap)
    return found


def _size_and_length(tables: Mapping[str, Any]) -> tuple[float, float]:
    """Parameters and tokens of a part of ladder 2."""
    model = make_config({"model": tables["model"]}).spec.model
    return float(count_block_weights(model)), float(tokens_of(tables))

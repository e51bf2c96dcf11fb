"""The registry of forecasts, docs/evidence/forecasts.csv: rows are added, and scored once outcomes are known.

The commit that added a row is its seal. No row changes but for its outcome; a forecast that changes, because
the law or the atlas did, becomes another row.
"""

import csv
import statistics
from collections.abc import Iterator, Sequence
from datetime import date
from io import StringIO
from pathlib import Path

from narrowgauge.files import write_whole
from narrowgauge.forecast import Forecaster, scheme, traits
from narrowgauge.recipes import recipe_names

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"
REGISTRY = EVIDENCE / "forecasts.csv"
LADDER = EVIDENCE / "ladder2" / "runs.csv"
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
    wanted = [(*one, "ladder 2") for one in ladder] + [(*one, "") for one in UNPUBLISHED]
    forecaster, added = Forecaster(), 0
    for name, params, tokens, source in wanted:
        recipe, ours = scheme(name).recipe, {}
        if source:  # the models of ladder 2 have four blocks, and are of the family of the ladder
            ours = {"family": "ladder", "tail": traits(recipe, blocks=4).tail_share}
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


def setting_of(row: dict[str, str]) -> tuple[str, float, float]:
    """What a row of the registry is a forecast of."""
    return row["recipe"], float(row["params"]), float(row["tokens"])


def _figures(row: dict[str, str]) -> tuple[str, str, str]:
    """What a row forecasts."""
    return row["low"], row["mean"], row["high"]


def with_outcomes(rows: Sequence[dict[str, str]]) -> Iterator[tuple[dict[str, str], str]]:
    """Each row with its outcome: its own, or that of ladder 2; "" as long as none is known."""
    outcomes = _of_ladder()
    for row in rows:
        yield row, row["outcome"] or outcomes.get(setting_of(row), "")


def _of_ladder() -> dict[tuple[str, float, float], str]:
    """The mean gap in percent of each arm of ladder 2 at the registered length, from scratch."""
    if not LADDER.is_file():
        return {}
    with LADDER.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["own_loss"]]
    gaps: dict[str, list[float]] = {}
    for row in rows:
        size, tokens = float(row["params"]), float(row["tokens"])
        if abs(size / LADDER_SIZE - 1) > 0.02 or abs(tokens / size / LADDER_LENGTH - 1) > 0.05:
            continue
        same = [
            float(r["own_loss"])
            for r in rows
            if r["arm"] in ("bf16", "bf16-again")
            and all(r[key] == row[key] for key in ("design", "seed", "size", "rung"))
        ]
        if same and row["design"] == "scratch":
            gaps.setdefault(row["arm"], []).append(
                100 * (float(row["own_loss"]) / statistics.fmean(same) - 1)
            )
    tokens = float(LADDER_SIZE * LADDER_LENGTH)
    return {
        (arm, float(LADDER_SIZE), tokens): f"{statistics.fmean(values):.2f}" for arm, values in gaps.items()
    }

"""Compares what `probe` measures of a scheme with what its training cost.

    python experiments/probe_kappa.py [FILES]

FILES are outputs of `narrowgauge probe RUN --recipes A,B --json`; together they become the measured table of
the room (`forecast/probe.json`). Without FILES the table there is compared again.

    kappa    the geometric mean of gap / (tokens per parameter / 100)^0.149 over the points of both Quartets;
             of a scheme with a wide forward pass, whose gap does not grow, the mean gap
    x        for a narrow forward pass the loss increase, in nats; else 1 - cos^2 of the gradient
    forecast x times the geometric mean of kappa / x over the other schemes of the same kind
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from narrowgauge.forecast import described, read_atlas
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole

TABLE = Path(__file__).parents[1] / "src" / "narrowgauge" / "forecast" / "probe.json"
EXPONENT = 0.149
FAMILIES = ("quartet", "quartet2")
#: How the table was measured.
MADE = {
    "command": "narrowgauge probe RUN --recipes SCHEMES --batches N --batch-size 8 --draws 2 --json",
    "model": "ladder-1m in fp32 after 160 steps of 2,048 tokens of novels (bpe-2048), validation loss 4.79",
}
COLUMNS = (
    "scheme",
    "kappa",
    "points",
    "loss increase",
    "1 - cos^2",
    "bias",
    "noise ratio",
    "forecast",
    "factor",
)


def kappa(name: str) -> tuple[float, int, bool]:
    """Kappa of a scheme in percent, the number of its points, and whether its forward pass is narrow."""
    atlas = read_atlas()
    points = atlas.where(recipe=name, family=FAMILIES).points
    if not points:
        return math.nan, 0, False
    if all(part.gemm != "fprop" for part in described(atlas.recipes[name]).parts):
        return mean(point.gap_percent for point in points), len(points), False
    scaled = [point.gap_percent / (point.tokens_per_param / 100) ** EXPONENT for point in points]
    return math.exp(mean(map(math.log, scaled))), len(points), True


def compared(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each scheme of the table that has points, with its forecast from the others of its kind."""
    rows = []
    for name, figures in measured["recipes"].items():
        value, points, is_forward = kappa(name)
        if not points:
            continue
        cosine = figures["gradient_cosine"]["mean"]
        loss, error = figures["loss_increase"]["mean"], 1 - cosine**2
        row = {"scheme": name, "kappa": value, "points": points, "loss increase": loss, "1 - cos^2": error}
        row |= {"bias": figures["gradient_bias"]["mean"], "noise ratio": figures["noise_ratio"]["mean"]}
        rows.append(
            row | {"kind": "forward" if is_forward else "backward", "x": loss if is_forward else error}
        )
    for row in rows:
        others = [math.log(o["kappa"] / o["x"]) for o in rows if o is not row and o["kind"] == row["kind"]]
        row["forecast"] = row["x"] * math.exp(mean(others)) if others else math.nan
        row["factor"] = math.exp(abs(math.log(row["forecast"] / row["kappa"])))
    return rows


def spreads(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The deviation of ln kappa - ln x about its mean over the schemes of each kind."""
    found = {}
    for kind in ("forward", "backward"):
        logs = [math.log(row["kappa"] / row["x"]) for row in rows if row["kind"] == kind]
        if len(logs) > 1:
            found[kind] = {"deviation": round(stdev(logs), 3), "schemes": len(logs)}
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, and how well each kind forecasts."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in sorted(rows, key=lambda r: (r["kind"], r["kappa"])):
        words = [w if isinstance(w := row[c], str) else "-" if w is None else f"{w:.3g}" for c in COLUMNS]
        lines.append("| " + " | ".join(words) + " |")
    for kind in ("forward", "backward"):
        factors = [row["factor"] for row in rows if row["kind"] == kind]
        if factors:
            inside = sum(factor <= 1.3 for factor in factors)
            spread = math.sqrt(mean(math.log(f) ** 2 for f in factors))
            lines.append(
                f"\n{kind}: {inside} of {len(factors)} within 1.3; deviation of ln kappa {spread:.2f}"
            )
    return "\n".join(lines)


def compare(files: list[str]) -> None:
    """Merge the files into the table, if there are any, and print the comparison."""
    if files:
        parts = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
        merged: dict[str, Any] = MADE | {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, CPU",
        }
        merged |= {key: parts[0][key] for key in ("step", "tokens", "draws")}
        recipes = {n: f | {"batches": p["batches"]} for p in parts for n, f in p["recipes"].items()}
        merged["spread"] = spreads(compared({"recipes": recipes}))
        merged["recipes"] = recipes
        write_whole(TABLE, json.dumps(merged, indent=1) + "\n")
    print(markdown(compared(json.loads(TABLE.read_text(encoding="utf-8")))))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="output of 'narrowgauge probe --json'")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        compare(_arguments().files)
    except UserError as error:
        sys.exit(f"probe_kappa: {error}")

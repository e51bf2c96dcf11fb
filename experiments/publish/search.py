"""Tables of docs/results.md: recipes of `search` against its baselines, and what each GEMM costs."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.report.verdict.rule import Judgement, judge
from narrowgauge.report.verdict.rungs import gap_percent
from publish.tables import markdown

WIDE = "bf16"
COLUMNS = ("change", "seed", "start", "steps", "loss")


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork: what it changed, the seed of its text, the step it left the run at, its steps, its loss."""

    change: str
    seed: int
    start: int
    steps: int
    loss: float


def read_forks(file: Path) -> list[Fork]:
    """The rows of a file; none if there is no file."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Fork(r["change"], int(r["seed"]), int(r["start"]), int(r["steps"]), float(r["loss"]))
            for r in csv.DictReader(lines)
        ]


def gaps_of(forks: Sequence[Fork]) -> dict[str, dict[int, float]]:
    """The gap of each change to bf16 by seed, in percent."""
    base = {f.seed: f.loss for f in forks if f.change == WIDE}
    gaps: dict[str, dict[int, float]] = {}
    for f in forks:
        if f.change != WIDE and f.seed in base:
            gaps.setdefault(f.change, {})[f.seed] = gap_percent(f.loss, base[f.seed])
    return gaps


def markdown_of(arms: Sequence[Fork], gemms: Sequence[Fork]) -> str:
    """Both tables, the second sorted by cost; a table without rows is left out."""
    parts = []
    if arms:
        parts += [f"Recipes, {_length(arms)}:\n", _table("recipe", gaps_of(arms), is_sorted=False)]
        parts += _against(gaps_of(arms))
    if gemms:
        parts += [f"One GEMM in MXFP4, {_length(gemms)}:\n", _table("GEMM", gaps_of(gemms), is_sorted=True)]
    return "\n".join(parts)


def _length(forks: Sequence[Fork]) -> str:
    """How far the forks went."""
    found = sorted({(f.start, f.steps) for f in forks})
    return ", ".join(f"{steps} steps from step {start}" for start, steps in found)


def _table(name: str, gaps: Mapping[str, Mapping[int, float]], is_sorted: bool) -> str:
    judged = judge(gaps, list(gaps))
    order = sorted(judged, key=lambda one: -judged[one].mean) if is_sorted else list(judged)
    lines = [
        [one, str(judged[one].seeds), f"{judged[one].mean:+.3f} %", _half(judged[one]), judged[one].word()]
        for one in order
    ]
    return markdown((name, "seeds", "gap", "95 %, all at once", "verdict"), lines, left=(name, "verdict"))


def _against(gaps: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Each recipe of `search` against the baselines of its budget, as a table; nothing without rows."""
    differences: dict[str, dict[int, float]] = {}
    for one, of_one in gaps.items():
        budget, _, name = one.partition("-")
        if name not in ("found", "forks"):
            continue
        for other in ("uniform", *(f"{budget}-{n}" for n in ("keep-ends", "smallest-error", "random"))):
            of_other = gaps.get(other, {})
            if common := {s: of_other[s] - gap for s, gap in of_one.items() if s in of_other}:
                differences[f"{other} to {one}"] = common
    if not differences:
        return []
    text = _table("baseline to search", differences, is_sorted=False)
    return ["A positive gap is a baseline that ends above the recipe of `search`:\n", text]


def _half(one: Judgement) -> str:
    return "-" if one.half_width is None else f"±{one.half_width:.3f} %"

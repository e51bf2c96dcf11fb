"""Remakes the tables of docs/forecast.md and docs/registered-forecasts.md, from data alone.

    python experiments/forecasts.py              writes both pages again: the same bytes from the same data
    python experiments/forecasts.py --register   adds forecasts to the registry that are not in it; none is
    changed python experiments/forecasts.py --noise      measures the noise of all casts again, which takes
    torch

A table stands between the lines `<!-- NAME -->` and `<!-- end NAME -->` of a page.
"""

import argparse
import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from io import StringIO
from pathlib import Path

from narrowgauge.files import write_whole
from narrowgauge.forecast import (
    Forecaster,
    Laws,
    Observed,
    fit_laws,
    read_atlas,
    scheme,
    scheme_names,
    traits,
)
from narrowgauge.forecast.hints import Reading, read_probe_file, readings
from narrowgauge.forecast.law import Law, Predicted
from narrowgauge.forecast.noise import TABLE, noise_csv
from narrowgauge.forecast.parts import described, in_nats, observations
from narrowgauge.forecast.published import loss_of, published_laws
from narrowgauge.forecast.setting import BACKWARD, FORWARD, UNIT_PARAMS, UNIT_TOKENS
from narrowgauge.recipes import GEMM_PLACES, recipe_names

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REGISTRY = DOCS / "evidence" / "forecasts.csv"
LADDER = DOCS / "evidence" / "ladder2" / "runs.csv"
PROBE = DOCS / "evidence" / "probe.json"
COLUMNS = ("registered", "recipe", "params", "tokens", "low", "mean", "high", "outcome", "source")
SMALL = 5.1e7  # parameters: the runs from which the gaps at 1.9 billion are forecast
#: The gaps of Quartet II's nanochat runs, bits per byte of its notebook at 8776a90: .6925 in bf16.
NANOCHAT = {
    "nvfp4-random-signs": 1.92,
    "nvfp4-random-signs-4over6": 1.76,
    "tetrajet2-tensor": 1.72,
    "quartet2-128": 1.44,
}
#: Published gaps of large runs: recipe, parameters, tokens, share of wide blocks, gap in percent, source.
LARGE = (
    ("nvfp4", 8e9, 1e12, 0.15, 1.5, "arXiv 2509.25149, 8 B hybrid, last 15 % of blocks wide"),
    ("mxfp4-square-hadamard", 8e9, 1e12, 0.15, 2.5, "arXiv 2509.25149, 8 B hybrid, last 15 % of blocks wide"),
    ("nvfp4", 12e9, 1e13, 0.15, 1.5, "arXiv 2509.25149, 12 B, about 1.5 % in the decay"),
    ("nvfp4", 8e9, 1.6e11, 0.125, 0.87, "arXiv 2610.00053, four wide blocks"),
    ("mxfp4-square-hadamard", 8e9, 1.6e11, 0.125, 2.11, "arXiv 2610.00053, four wide blocks"),
)
#: Settings of which nobody has published a gap on the day of registration.
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
CURVES = ("power", "shares", "both")
Fold = tuple[str, list[Observed], list[Observed]]  # what is left out, the rest, the held-out points


@dataclass(frozen=True)
class Score:
    """Held-out points: their forecasts and what was measured."""

    predicted: list[Predicted]
    gaps: list[float]

    def __len__(self) -> int:
        return len(self.gaps)

    @property
    def coverage(self) -> float:
        """The share of points in their intervals of 90 %."""
        inside = [
            p.interval()[0] <= gap <= p.interval()[1]
            for p, gap in zip(self.predicted, self.gaps, strict=True)
        ]
        return sum(inside) / len(inside)

    @property
    def error(self) -> float:
        """The mean absolute error in percent of the loss."""
        return statistics.fmean(abs(p.gap - gap) for p, gap in zip(self.predicted, self.gaps, strict=True))

    @property
    def factor(self) -> float:
        """The median factor between forecast and gap, for gaps above a tenth of a percent."""
        logs = [
            abs(math.log(p.gap / gap)) for p, gap in zip(self.predicted, self.gaps, strict=True) if gap > 0.1
        ]
        return math.exp(statistics.median(logs)) if logs else math.nan


def scored(folds: Iterator[Fold]) -> dict[str, dict[str, Score]]:
    """The score of each curve, and of both together, in each fold."""
    found: dict[str, dict[str, Score]] = {name: {} for name in CURVES}
    for name, rest, held in folds:
        laws = fit_laws(rest)
        gaps = [one.gap for one in held]
        for curve, law in zip(CURVES, (*laws.each, laws), strict=True):
            found[curve][name] = Score([law.predict(one.setting) for one in held], gaps)
    return found


def folds(observed: Sequence[Observed], key: Callable[[Observed], str], least: int = 1) -> Iterator[Fold]:
    """Leave out the points of one value of `key` at a time."""
    observed = [one for one in observed if one.setting.parts]
    for value in dict.fromkeys(map(key, observed)):
        held = [one for one in observed if key(one) == value]
        if len(held) >= least:
            yield value, [one for one in observed if key(one) != value], held


def pooled(scores: dict[str, Score]) -> Score:
    """All folds as one."""
    return Score(
        [p for s in scores.values() for p in s.predicted], [g for s in scores.values() for g in s.gaps]
    )


def by_size(one: Observed) -> str:
    """The size of a point, in words."""
    return f"{one.setting.params / 1e6:.3g} M"


def by_scheme(one: Observed) -> str:
    """The recipe of a point."""
    return one.setting.recipe


def by_paper(one: Observed) -> str:
    """The family of a point: a paper, or a thread."""
    return one.setting.family


def calibration() -> str:
    """Error and coverage, leaving out one size, one scheme, one paper at a time; at one size, in "
    "nats as well."""
    atlas = read_atlas()
    percent = observations(atlas)
    head = (
        "left out",
        "unit",
        "curve",
        "folds",
        "points",
        "mean error",
        "median factor",
        "in the 90 % interval",
    )
    lines: list[Sequence[str]] = [head]
    for what, key in (("one size", by_size), ("one scheme", by_scheme), ("one paper", by_paper)):
        for unit in ("%", "nats / 100") if key is by_size else ("%",):
            observed = percent if unit == "%" else in_nats(percent, atlas.points)
            for curve, scores in scored(folds(observed, key)).items():
                both = pooled(scores)
                figures = (f"{both.error:.3f} {unit}", f"{both.factor:.2f}", f"{both.coverage:.1%}")
                lines.append((what, unit, curve, f"{len(scores)}", f"{len(both)}", *figures))
    return table(lines)


def sizes() -> str:
    """Leaving out one size: the error at each."""
    scores = scored(folds(observations(read_atlas()), by_size))
    lines: list[Sequence[str]] = [("left out", "points", *(f"{c}: error, factor, covered" for c in CURVES))]
    for name, one in scores["both"].items():
        found = [scores[curve][name] for curve in CURVES]
        lines.append(
            (name, f"{len(one)}", *(f"{s.error:.3f}, {s.factor:.2f}, {s.coverage:.0%}" for s in found))
        )
    return table(lines)


def nanochat() -> str:
    """The gaps at 1.9 billion parameters, from runs of at most 50 million."""
    laws = fit_laws([one for one in observations(read_atlas()) if one.setting.params < SMALL])
    lines: list[Sequence[str]] = [("scheme", "published", *(f"{curve} (90 %)" for curve in CURVES))]
    for name, gap in NANOCHAT.items():
        setting = described(scheme(name).recipe).setting(name, 1.9e9, 3.8e10, 0.0)
        cells = (interval(law.predict(setting)) for law in (*laws.each, laws))
        lines.append((f"`{name}`", f"{gap:.2f}", *cells))
    return table(lines)


def large() -> str:
    """Large published runs, forecast from all points of at most 210 million parameters."""
    laws = fit_laws([one for one in observations(read_atlas()) if one.setting.params < 2.1e8])
    lines: list[Sequence[str]] = [("recipe", "parameters, tokens", "published", *CURVES, "source")]
    for name, params, tokens, tail, gap, source in LARGE:
        setting = described(scheme(name).recipe).setting(name, params, tokens, tail)
        cells = [interval(law.predict(setting)) for law in (*laws.each, laws)]
        lines.append((f"`{name}`", f"{params / 1e9:g} B, {tokens / 1e12:g} T", f"{gap:g}", *cells, source))
    return table(lines)


def laws() -> str:
    """Four published laws on the same held-out points: 4-bit forward passes, one size left out."""
    atlas = read_atlas()
    held: list[tuple[Observed, float]] = []
    for _, rest, points in folds(observations(atlas), by_size):
        law = fit_laws(rest)
        held += [(one, law.predict(one.setting).gap) for one in points]
    factors: dict[str, list[float]] = {}
    for one, ours in held:
        s, recipe = one.setting, atlas.recipes[one.setting.recipe]
        if one.gap < 0.5 or not any(part.side == FORWARD for part in s.parts):
            continue
        loss = loss_of(s.params, s.tokens)
        figures = {"this law": ours * loss / 100} | dict(published_laws(recipe, s.params, s.tokens))
        for name, nats in figures.items():
            if nats is not None and nats > 0:
                factors.setdefault(name, []).append(math.log(nats / (one.gap * loss / 100)))
    lines: list[Sequence[str]] = [
        ("law", "points", "median of forecast / measured", "median factor off", "within a factor of 1.3")
    ]
    for name, logs in factors.items():
        off = [abs(x) for x in logs]
        lines.append(
            (
                *(name, f"{len(logs)}", f"{math.exp(statistics.median(logs)):.2f}"),
                *(
                    f"{math.exp(statistics.median(off)):.2f}",
                    f"{sum(x < math.log(1.3) for x in off) / len(off):.0%}",
                ),
            )
        )
    return table(lines)


def kappas() -> str:
    """Kappa of a scheme without its points: from its parts, and from the probe; leaving one scheme out."""
    atlas = read_atlas()
    observed = observations(atlas)
    full = Forecaster().law
    probed = read_probe_file(PROBE) if PROBE.is_file() else {}
    read = {
        name: readings(figures)
        for name, figures in probed.items()
        if name in atlas.recipes or name in recipe_names()
    }
    lines: list[Sequence[str]] = [("scheme", "kappa", "without its points, from its parts", "factor")]
    factors = []
    for name, rest, _ in folds(observed, by_scheme, least=3):
        setting = described(atlas.recipes[name]).setting(name, UNIT_PARAMS, UNIT_TOKENS, 0.0)
        known, blind = full.predict(setting), fit_laws(rest).predict(setting)
        if known.gap < 0.1:
            continue
        factors.append(blind.gap / known.gap)
        lines.append((f"`{name}`", f"{known.gap:.2f}", interval(blind, noise=False), f"{factors[-1]:.2f}"))
    within = sum(1 / 1.3 < x < 1.3 for x in factors) / len(factors)
    text = table(lines)
    text += f"\n\nFrom the parts, {within:.0%} of {len(factors)} schemes lie within a factor of 1.3."
    return text + "\n\n" + _probe_text(full, read, atlas.recipes)


def _probe_text(law: Laws, read: dict[str, dict[str, Reading]], recipes: object) -> str:
    """How well the probe tells kappa, leaving one recipe out of its anchors."""
    seen = {one.setting.recipe for one in law.observed}
    lines: list[Sequence[str]] = [("recipe", "pass", "kappa of the law", "from the probe", "factor")]
    count, good = 0, 0
    for side in (FORWARD, BACKWARD):
        logs = {}
        for name, found in read.items():
            if side not in found or (name not in seen):
                continue
            setting = described(scheme(name).recipe).setting(name, UNIT_PARAMS, UNIT_TOKENS, 0.0)
            terms = law.terms(setting)
            total = sum(t for part, t in zip(setting.parts, terms, strict=True) if part.side == side)
            if total > 0:
                logs[name] = (math.log(total), found[side].log)
        for name, (known, own) in logs.items():
            others = [k - x for other, (k, x) in logs.items() if other != name]
            if not others:
                continue
            told = own + statistics.fmean(others)
            count, good = count + 1, good + (abs(told - known) < math.log(1.3))
            cells = (f"{math.exp(known):.2f}", f"{math.exp(told):.2f}", f"{math.exp(told - known):.2f}")
            lines.append((f"`{name}`", side, *cells))
    if not count:
        return "No probed recipe has points."
    return (
        table(lines)
        + f"\n\nFrom the probe of one model of 0.85 million parameters, {good} of {count} lie within 1.3."
    )


def coefficients() -> str:
    """The fitted coefficients of both curves, with their deviations, and the variances."""
    power, shares = Forecaster().law.each
    rows: list[tuple[str, Callable[[Law], tuple[float, float] | float]]] = [
        ("exponent of the backward pass", lambda law: law.coefficient("exponent")),
        ("eta, power of the noise", lambda law: law.coefficient("eta")),
        ("tau, power of the narrow share", lambda law: law.coefficient("tail")),
        ("finish", lambda law: law.coefficient("finish")),
    ]
    rows += [
        (f"deviation of {name}", lambda law, name=name: law.deviations[name]) for name in power.deviations
    ]
    rows.append(("scatter of points, share of the gap", lambda law: law.scatter))
    lines: list[Sequence[str]] = [("coefficient", "power", "shares")]
    for law, column in ((power, 0), (shares, 1)):
        for name in law.curve.priors:
            mean, deviation = law.coefficient("curve", name)
            cells = ["", ""]
            cells[column] = f"{mean:.3f} ± {deviation:.3f}"
            lines.append((f"{name} of the curve", *cells))
    for name, value in rows:
        found = [value(law) for law in (power, shares)]
        cells = [f"{x[0]:.3f} ± {x[1]:.3f}" if isinstance(x, tuple) else f"{x:.3f}" for x in found]
        lines.append((name, *cells))
    gain = shares.evidence - power.evidence
    return table(lines) + f"\n\nThe points prefer shares to the power law by {gain:+.0f} in ln P."


def registered() -> str:
    """The registry, with outcomes as far as they are known."""
    outcomes = _of_ladder()
    lines: list[Sequence[str]] = [
        ("registered", "recipe", "parameters, tokens", "forecast, % (90 %)", "outcome", "verdict", "source")
    ]
    inside = tried = 0
    for row in read_registry():
        key = row["recipe"], float(row["params"]), float(row["tokens"])
        outcome = row["outcome"] or outcomes.get(key, "")
        word = ""
        if outcome:
            is_inside = float(row["low"]) <= float(outcome) <= float(row["high"])
            word, tried, inside = ("inside" if is_inside else "outside"), tried + 1, inside + is_inside
        size = f"{float(row['params']) / 1e6:,.4g} M, {float(row['tokens']) / 1e6:,.4g} M"
        gap = f"{float(row['mean']):.2f} ({float(row['low']):.2f} to {float(row['high']):.2f})"
        lines.append((row["registered"], f"`{row['recipe']}`", size, gap, outcome, word, row["source"]))
    total = len(lines) - 1
    return table(lines) + f"\n\n{total} forecasts; {tried} have an outcome, {inside} of them inside."


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


def read_registry() -> list[dict[str, str]]:
    """The rows of the registry."""
    if not REGISTRY.is_file():
        return []
    with REGISTRY.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def register(today: date) -> int:
    """Add what is not registered yet; returns how many rows were added."""
    rows = read_registry()
    known = {(row["recipe"], float(row["params"]), float(row["tokens"])) for row in rows}
    ladder = [(name, float(LADDER_SIZE), float(LADDER_SIZE * LADDER_LENGTH)) for name in recipe_names()]
    wanted = [(*one, "ladder 2") for one in ladder] + [(*one, "") for one in UNPUBLISHED]
    forecaster, added = Forecaster(), 0
    for name, params, tokens, source in wanted:
        recipe, ours = scheme(name).recipe, {}
        if source:  # the models of ladder 2 have four blocks, and are of the family of the ladder
            ours = {"family": "ladder", "tail": traits(recipe, blocks=4).tail_share}
        found = forecaster.forecast(recipe, params, tokens, name, **ours)
        if (name, params, tokens) in known or found.gap_percent is None or not found.setting.parts:
            continue
        gap, added = found.gap_percent, added + 1
        figures = {"low": f"{gap.low:.3f}", "mean": f"{gap.mean:.3f}", "high": f"{gap.high:.3f}"}
        size = {"params": f"{params:.0f}", "tokens": f"{tokens:.0f}"}
        rows.append(
            {
                "registered": today.isoformat(),
                "recipe": name,
                **size,
                **figures,
                "outcome": "",
                "source": source,
            }
        )
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(REGISTRY, text.getvalue())
    return added


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "forecast.md": {
        "coefficients": coefficients,
        "calibration": calibration,
        "sizes": sizes,
        "nanochat": nanochat,
        "large": large,
        "laws": laws,
        "kappas": kappas,
    },
    "registered-forecasts.md": {"registered": registered},
}


def filled(text: str, name: str, inside: str) -> str:
    """A page with another text between the lines of a name."""
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    found, count = pattern.subn(lambda _: f"{begin}\n\n{inside}\n\n{end}", text)
    assert count == 1, f"the page has {count} places for {name}"
    return found


def page(name: str, only: Sequence[str] = ()) -> str:
    """The text of a page, with its tables made again."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for place, make in PAGES[name].items():
        if not only or place in only:
            text = filled(text, place, make())
    return text


def table(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is its head."""
    head, *rest = lines
    rows = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rest)]
    return "\n".join(rows)


def interval(predicted: Predicted, noise: bool = True) -> str:
    """A forecast and its interval of 90 %."""
    low, high = predicted.interval(1.0 if noise else math.inf)
    return f"{predicted.gap:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Remake what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--register", action="store_true", help="add forecasts to the registry")
    parser.add_argument("--noise", action="store_true", help="measure the noise of all casts")
    options = parser.parse_args()
    if options.noise:
        recipes = [scheme(name).recipe for name in (*recipe_names(), *scheme_names())]
        casts = {r.casts[place] for r in recipes for place in GEMM_PLACES if r.casts[place].element.bits < 16}
        write_whole(TABLE, noise_csv(casts))
    if options.register:
        print(f"registered: {register(date.today())}")
    for name in PAGES:
        write_whole(DOCS / name, page(name))
        print(f"written: docs/{name}")


if __name__ == "__main__":
    main()

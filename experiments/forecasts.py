"""Remakes the tables of docs/forecast.md and docs/evidence.md, from data alone.

    python experiments/forecasts.py              writes both pages again: the same bytes from the same data
    python experiments/forecasts.py --register   adds forecasts that are new or have changed to the registry;
                                                 no row of it changes
    python experiments/forecasts.py --scores     writes docs/evidence.md alone, in seconds
    python experiments/forecasts.py --noise      measures the noise of all casts again, which takes torch

A table stands between the lines `<!-- NAME -->` and `<!-- end NAME -->` of a page.
"""

import argparse
import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby
from pathlib import Path

from narrowgauge.forecast import (
    Forecaster,
    Laws,
    Observed,
    fit_laws,
    read_atlas,
    scheme,
    scheme_names,
)
from narrowgauge.forecast.hints import hints, read_probe_file
from narrowgauge.forecast.law import Law, Predicted
from narrowgauge.forecast.noise import TABLE, cast_text, measured_noise
from narrowgauge.forecast.parts import described, observations
from narrowgauge.forecast.published import loss_of, published_laws
from narrowgauge.forecast.setting import BACKWARD, FORWARD, UNIT_PARAMS, UNIT_TOKENS
from narrowgauge.recipes import GEMM_PLACES, recipe_names
from narrowgauge.system.files import write_whole
from narrowgauge.system.t_interval import Interval
from narrowgauge.system.units import human_count
from publish.probed import LEAST, spearman
from registry import Key, Sealed, register, sealed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PROBE = DOCS / "evidence" / "probe.json"
REGISTERED = "evidence.md"
SMALL = 5.1e7  # parameters: the runs from which the gaps at 1.9 billion are forecast
SMALL_GAP = 0.5  # percent: below lie the forecasts of 8 bits, and of forward passes that end wide
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
CURVES = ("power", "shares", "both")
Fold = tuple[str, list[Observed], list[Observed]]  # what is left out, the rest, the held-out points


@dataclass(frozen=True)
class Score:
    """Forecasts with their intervals of 90 %, and the gaps that were measured, in percent."""

    predicted: list[Interval]
    gaps: list[float]

    def __len__(self) -> int:
        return len(self.gaps)

    @property
    def coverage(self) -> float:
        """The share of points in their intervals."""
        return statistics.fmean(p.low <= gap <= p.high for p, gap in self._pairs())

    @property
    def error(self) -> float:
        """The mean absolute error in percent of the loss."""
        return statistics.fmean(abs(p.mean - gap) for p, gap in self._pairs())

    @property
    def factor(self) -> float:
        """The median factor between forecast and gap, for gaps above a tenth of a percent."""
        return math.exp(statistics.median(map(abs, logs))) if (logs := self._logs()) else math.nan

    @property
    def bias(self) -> float:
        """The median of forecast / gap, for the same gaps."""
        return math.exp(statistics.median(logs)) if (logs := self._logs()) else math.nan

    @property
    def reach(self) -> float:
        """The largest distance of a gap from its forecast, over that of the end of the interval beyond it."""
        return max((g - p.mean) / ((p.high if g > p.mean else p.low) - p.mean) for p, g in self._pairs())

    def _pairs(self) -> list[tuple[Interval, float]]:
        return list(zip(self.predicted, self.gaps, strict=True))

    def _logs(self) -> list[float]:
        return [math.log(p.mean) - math.log(gap) for p, gap in self._pairs() if gap > 0.1]


def scored(folds: Iterator[Fold], losses: Mapping[int, float] | None = None) -> dict[str, dict[str, Score]]:
    """The score of each curve, and of both together, in each fold, in percent.

    Args:
        folds: The folds.
        losses: The loss of the reference of each point by its id, where gaps are in nats.
    """
    found: dict[str, dict[str, Score]] = {name: {} for name in CURVES}
    for name, rest, held in folds:
        laws = fit_laws(rest)
        units = [1 / losses[id(one)] if losses else 1.0 for one in held]
        gaps = [one.gap * unit for one, unit in zip(held, units, strict=True)]
        for curve, law in zip(CURVES, (*laws.each, laws), strict=True):
            raw = [law.predict(one.setting) for one in held]
            predicted = [
                Interval(*(unit * x for x in (p.gap, *p.interval())))
                for p, unit in zip(raw, units, strict=True)
            ]
            found[curve][name] = Score(predicted, gaps)
    return found


def folds(observed: Sequence[Observed], key: Callable[[Observed], str], least: int = 1) -> Iterator[Fold]:
    """Leave out the points of one value of `key` at a time."""
    observed = [one for one in observed if one.setting.parts]
    for value in dict.fromkeys(map(key, observed)):
        held = [one for one in observed if key(one) == value]
        if len(held) >= least:
            yield value, [one for one in observed if key(one) != value], held


LEFT_OUT: tuple[tuple[str, Callable[[Observed], str]], ...] = (
    ("one size", lambda one: f"{one.setting.params / 1e6:.3g} M"),
    ("one scheme", lambda one: one.setting.recipe),
    ("one paper", lambda one: one.setting.family),  # or a thread
)
(_, _BY_SIZE), (_, _BY_SCHEME), _ = LEFT_OUT


def pooled(scores: dict[str, Score]) -> Score:
    """All folds as one."""
    return Score(
        [p for s in scores.values() for p in s.predicted], [g for s in scores.values() for g in s.gaps]
    )


def calibration() -> str:
    """Error and coverage, leaving out one size, scheme or paper at a time; the last column counts folds."""
    observed = observations(read_atlas())
    lines: list[Sequence[str]] = [("left out", "curve", "folds", *_SCORED, "mean of the folds")]
    for what, key in LEFT_OUT:
        for curve, scores in scored(folds(observed, key)).items():
            by_fold = statistics.mean(score.coverage for score in scores.values())
            lines.append((what, curve, f"{len(scores)}", *_words_of(pooled(scores)), f"{by_fold:.1%}"))
    return table(lines)


_SCORED = ("points", "mean error, %", "median factor", "in the 90 % interval")


def _words_of(score: Score) -> tuple[str, ...]:
    return f"{len(score)}", f"{score.error:.3f}", f"{score.factor:.3f}", f"{score.coverage:.1%}"


def units() -> str:
    """The same of a law of gaps in percent and of one in nats, on the points that have losses."""
    atlas = read_atlas()
    pairs = zip(observations(atlas), atlas.points, strict=True)
    known = [(one, point) for one, point in pairs if point.gap_nats is not None]
    percent, points = [one for one, _ in known], [point for _, point in known]
    nats = [replace(one, gap=100 * (point.gap_nats or 0.0), error=None) for one, point in known]
    losses = {id(one): float(point.reference_loss or 0) for one, point in zip(nats, points, strict=True)}
    lines: list[Sequence[str]] = [("left out", "law of", *_SCORED)]
    for what, key in LEFT_OUT:
        for unit, observed, of in (("percent", percent, None), ("nats", nats, losses)):
            lines.append((what, unit, *_words_of(pooled(scored(folds(observed, key), of)["both"]))))
    return table(lines)


def sizes() -> str:
    """Leaving out one size: the error at each."""
    scores = scored(folds(observations(read_atlas()), _BY_SIZE))
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


def up_to(params: float) -> Score:
    """The points above a billion parameters, forecast from those of at most `params`."""
    observed = [one for one in observations(read_atlas()) if one.setting.parts]
    laws = fit_laws([one for one in observed if one.setting.params <= params])
    held = [one for one in observed if one.setting.params > 1e9]
    found = [laws.predict(one.setting) for one in held]
    return Score([Interval(p.gap, *p.interval()) for p in found], [one.gap for one in held])


def more() -> str:
    """What larger runs add to the forecasts of the points above a billion parameters."""
    lines: list[Sequence[str]] = [("runs of at most", "points", "mean error, %", "in the 90 % interval")]
    for params in (6e7, 1.2e8, 2.5e8, 1e9):
        score = up_to(params)
        lines.append((f"{params / 1e6:g} M", f"{len(score)}", f"{score.error:.3f}", f"{score.coverage:.1%}"))
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
    for _, rest, points in folds(observations(atlas), _BY_SIZE):
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
    lines: list[Sequence[str]] = [("scheme", "kappa", "without its points, from its parts", "factor")]
    factors = []
    for name, rest, _ in folds(observed, _BY_SCHEME, least=3):
        setting = described(atlas.recipes[name]).setting(name, UNIT_PARAMS, UNIT_TOKENS, 0.0)
        known, blind = full.predict(setting), fit_laws(rest).predict(setting)
        if known.gap < 0.1:
            continue
        factors.append(blind.gap / known.gap)
        lines.append((f"`{name}`", f"{known.gap:.2f}", interval(blind, noise=False), f"{factors[-1]:.2f}"))
    within = sum(1 / 1.3 < x < 1.3 for x in factors) / len(factors)
    text = table(lines)
    text += f"\n\nFrom the parts, {within:.0%} of {len(factors)} schemes lie within a factor of 1.3."
    return text + "\n\n" + _probe_text(full)


def _probe_text(law: Laws) -> str:
    """How well the probe shows kappa, leaving one recipe out of its anchors."""
    probed, known = read_probe_file(PROBE), {*recipe_names(), *scheme_names()}
    recipes = {name: described(scheme(name).recipe) for name in probed if name in known}
    seen = {one.setting.recipe for one in law.observed}
    lines: list[Sequence[str]] = [("recipe", "pass", "kappa of the law", "from the probe (90 %)", "factor")]
    good = inside = 0
    for side in (FORWARD, BACKWARD):
        for name in sorted(seen & recipes.keys(), key=list(probed).index):
            found = [one for one in hints(law, probed, recipes, [name]) if one.part.side == side]
            if not found:
                continue
            setting = recipes[name].setting(name, UNIT_PARAMS, UNIT_TOKENS, 0.0)
            terms = zip(setting.parts, law.terms(setting), strict=True)
            total = sum(term for part, term in terms if part.side == side)
            off = found[0].shift - law.shift(found[0].part, name)[0]
            ends = [off + sign * 1.645 * found[0].deviation for sign in (-1, 1)]
            good, inside = good + (abs(off) < math.log(1.3)), inside + (ends[0] < 0 < ends[1])
            low, high = (total * math.exp(end) for end in ends)
            told = f"{total * math.exp(off):.2f} ({low:.2f} to {high:.2f})"
            lines.append((f"`{name}`", side, f"{total:.2f}", told, f"{math.exp(off):.2f}"))
    return (
        table(lines)
        + f"\n\nFrom the probe of one model of 0.85 million parameters, {good} of {len(lines) - 1} "
        f"lie within 1.3, {inside} in their intervals."
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


def scores() -> str:
    """How well sealed forecasts agree with their outcomes, by setting and size of the forecast."""
    known = [one for one in sealed() if one.pairs]
    groups: dict[str, list[Sealed]] = {}
    for one in known:
        level = "at least" if one.gap.mean >= SMALL_GAP else "below"
        groups.setdefault(f"{_size(one.key)}, {level} {SMALL_GAP} %", []).append(one)
    head = ("forecasts", *_SCORED, "forecast / measured", "largest miss / half interval", "rank correlation")
    lines: list[Sequence[str]] = [head]
    for name, group in (*groups.items(), ("all", known)):
        means = [one.outcome for one in group if one.outcome is not None]
        score = Score([one.gap for one in group], means)
        words = (*_words_of(score), f"{score.bias:.2f}", f"{score.reach:.2f}")
        lines.append((name, *words, _ranks([one.gap.mean for one in group], means)))
    return table(lines)


def _ranks(forecasts: Sequence[float], gaps: Sequence[float]) -> str:
    """Spearman's rank correlation with its interval of 95 %; "-" for too few."""
    if len(gaps) < LEAST:
        return "-"
    low, rho, high = spearman(forecasts, gaps)
    return f"{rho:+.2f} ({low:+.2f} to {high:+.2f})"


def registered() -> str:
    """All sealed forecasts, a line for each setting; first those that have an outcome."""
    rows = sorted(sealed(), key=lambda one: not one.pairs)
    days = sorted({one.day for one in rows})
    columns = ("recipe", "parameters, tokens", *(f"registered {day}" for day in days))
    lines: list[Sequence[str]] = [(*columns, "outcome", "pairs", "inside", "source")]
    settings: dict[Key, list[Sealed]] = {}
    for one in rows:
        settings.setdefault(one.key, []).append(one)
    verdicts = [_is_inside(one) for one in rows if one.pairs]
    for key, group in settings.items():
        gaps = {one.day: f"{one.gap.mean:.2f} ({one.gap.low:.2f} to {one.gap.high:.2f})" for one in group}
        first = group[0]
        outcome = "" if first.outcome is None else f"{first.outcome:.2f}"
        inside = ", ".join("yes" if _is_inside(one) else "no" for one in group if one.pairs)
        cells = (f"`{key[0]}`", _size(key), *(gaps.get(day, "") for day in days))
        lines.append((*cells, outcome, f"{len(first.pairs) or ''}", inside, first.source))
    return (
        f"{len(rows)} forecasts of {len(settings)} settings; {len(verdicts)} have an outcome, "
        f"{sum(verdicts)} of them inside.\n\n{table(lines)}"
    )


def _is_inside(one: Sealed) -> bool:
    return one.outcome is not None and one.gap.low <= one.outcome <= one.gap.high


def _size(key: Key) -> str:
    """Parameters and tokens in millions."""
    return ", ".join(f"{x / 1e6:,.4g} M" for x in key[1:])


def sources() -> str:
    """A row for each source of the atlas: its points, and the range of their parameters and tokens."""
    lines = [("source", "points", "parameters", "tokens")]
    points = sorted(read_atlas().points, key=lambda point: point.source)
    for source, group in groupby(points, key=lambda point: point.source):
        of_source = list(group)
        ranges = (_range([p.params for p in of_source]), _range([p.tokens for p in of_source]))
        lines.append((source, str(len(of_source)), *ranges))
    return table(lines)


def _range(numbers: Sequence[float]) -> str:
    ends = dict.fromkeys(human_count(number) for number in (min(numbers), max(numbers)))
    return " to ".join(ends)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "forecast.md": {
        "coefficients": coefficients,
        "calibration": calibration,
        "units": units,
        "sizes": sizes,
        "nanochat": nanochat,
        "more": more,
        "large": large,
        "laws": laws,
        "kappas": kappas,
        "sources": sources,
    },
    REGISTERED: {"scores": scores, "registered": registered},
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
    parser.add_argument("--scores", action="store_true", help="write docs/evidence.md alone")
    parser.add_argument("--noise", action="store_true", help="measure the noise of all casts")
    options = parser.parse_args()
    if options.noise:
        recipes = [scheme(name).recipe for name in (*recipe_names(), *scheme_names())]
        casts = {r.casts[place] for r in recipes for place in GEMM_PLACES if r.casts[place].element.bits < 16}
        noise = sorted({cast_text(cast): measured_noise(cast) for cast in casts}.items())
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("cast", "noise"), *noise])
    if options.register:
        print(f"registered: {register(date.today())}")
    for name in [REGISTERED] if options.scores else PAGES:
        write_whole(DOCS / name, page(name))
        print(f"written: docs/{name}")


if __name__ == "__main__":
    main()

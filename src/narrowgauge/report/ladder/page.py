"""The results of a ladder for readers: Markdown for the documentation, and one HTML file beside the runs."""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.analysis.rank_correlation import rank_correlation
from narrowgauge.report.compare.power import Plan, seeds_for_equality, smallest_gap
from narrowgauge.report.compare.rule import MARGIN, Judgement, is_control
from narrowgauge.report.ladder.contrasts import growth, share_cells, shares, unpaired_deviation
from narrowgauge.report.ladder.figures import ladder_svg
from narrowgauge.report.ladder.predictions import Prediction, outcome
from narrowgauge.report.ladder.results import DIVERGED, Row
from narrowgauge.report.ladder.statistics import ArmResult, arm_results
from narrowgauge.report.ladder.table import COLUMNS, cells, ends, markdown, percent
from narrowgauge.report.page.plain_page import html_table, plain_page
from narrowgauge.units import human_count

Table = tuple[Sequence[str], list[list[str]]]  # head, lines
PREDICTED = ("arm", "what", "predicted", "measured", "95 % interval", "outcome")
_PROBED = {
    "loss_increase": ("loss increase", ".4f"),
    "gradient_cosine": ("cosine", ".3f"),
    "effective_bits": ("effective bits", ".1f"),
    "averaging_slope": ("averaging slope", ".2f"),
    "noise_ratio": ("gradient / noise", ".1f"),
}


def main_table(results: Sequence[ArmResult]) -> Table:
    """The highest rung: arm, gap, interval and what belongs to it, the smallest gap first."""
    last = max((result.rung for result in results), default=0)
    top = [result for result in results if result.rung == last]
    top.sort(key=lambda r: math.inf if math.isnan(r.gap.mean) else r.gap.mean)
    return COLUMNS, [cells(result) for result in top]


def rung_table(results: Sequence[ArmResult]) -> Table:
    """Every arm at every rung."""
    order = list(dict.fromkeys(result.arm for result in results))
    return COLUMNS, [cells(r) for r in sorted(results, key=lambda r: (order.index(r.arm), r.rung))]


def prediction_table(predictions: Sequence[Prediction], rows: Sequence[Row]) -> Table:
    """Each prediction with its outcome."""
    lines = []
    for one in predictions:
        found, word = outcome(one, rows)
        span = f"{_end(one.low)} .. {_end(one.high)}"
        lines.append([one.arm, one.what, span, percent(found.mean), ends(found), word])
    return PREDICTED, lines


def probe_table(probe: Mapping[str, Any], results: Sequence[ArmResult] = ()) -> Table:
    """What the probe says of each arm's recipe, from the JSON that it wrote, and whether the gaps agree.

    Below the arms stands, for each rung, Spearman's rank correlation of each column with the mean gaps, if
    three arms or more have both. A good figure is near 1, or near -1 where less is worse.
    """
    lines = []
    for arm, figures in probe["recipes"].items():
        means = [(figures.get(key) or {}).get("mean") for key in _PROBED]
        texts = [
            "-" if mean is None else f"{mean:{form}}"
            for mean, (_, form) in zip(means, _PROBED.values(), strict=True)
        ]
        lines.append([arm, *texts])
    lines += [_agreement(probe, results, rung) for rung in sorted({result.rung for result in results})]
    return ("arm", *(title for title, _ in _PROBED.values())), lines


def _agreement(probe: Mapping[str, Any], results: Sequence[ArmResult], rung: int) -> list[str]:
    """The rank correlations of the probe's columns with the gaps at a rung."""
    gaps = {r.arm: r.gap.mean for r in results if r.rung == rung and math.isfinite(r.gap.mean)}
    texts = []
    for key in _PROBED:
        found = {arm: (probe["recipes"].get(arm, {}).get(key) or {}).get("mean") for arm in gaps}
        pairs = [(mean, gaps[arm]) for arm, mean in found.items() if mean is not None]
        value = rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else math.nan
        texts.append("-" if math.isnan(value) else f"{value:+.2f} ({len(pairs)})")
    return [f"Spearman with the gaps at rung {rung} (arms)", *texts]


def rate_table(rows: Sequence[Row]) -> Table:
    """The losses of a sweep of the learning rate: a line for each arm NAME,lr=RATE and length."""
    found: dict[tuple[str, int], dict[float, float]] = {}
    for row in rows:
        name, _, rate = row.arm.partition(",lr=")
        if rate and math.isfinite(row.own_loss):
            found.setdefault((name, row.tokens), {})[float(rate)] = row.own_loss
    rates = sorted({rate for losses in found.values() for rate in losses})
    lines = []
    for (name, tokens), losses in found.items():
        texts = [f"{losses[rate]:.4f}" if rate in losses else "-" for rate in rates]
        lines.append([name, human_count(tokens), *texts, f"{min(losses, key=losses.__getitem__):g}"])
    return ("arm", "tokens", *(f"{rate:g}" for rate in rates), "best"), lines


def growth_table(rows: Sequence[Row]) -> Table:
    """Each arm against each run of the reference: the gap at the highest rung, and its growth."""
    low, high = (of(row.rung for row in rows) for of in (min, max))
    head = ("arm", "to", f"gap, rung {high}", "95 % interval", f"growth since rung {low}", "95 % interval")
    lines = [
        [arm, reference, percent(gap.mean), ends(gap), percent(more.mean), ends(more)]
        for arm, reference, gap, more in growth(rows)
    ]
    return head, lines


def share_table(rows: Sequence[Row]) -> Table:
    """The part of a whole recipe's gap that its forward pass alone has."""
    lines = [
        [part, whole, reference, *share_cells(share, by_seed)]
        for part, whole, reference, share, by_seed in shares(rows)
    ]
    return ("part", "of the gap of", "to", "share", "95 % interval", "by seed, %"), lines


def _end(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "∞"


def facts(rows: Sequence[Row], reference: str = "") -> list[str]:
    """Sentences on what was run: runs, seeds, what diverged, what is missing."""
    reference = reference or rows[0].arm
    arms = list(dict.fromkeys(row.arm for row in rows))
    seeds = {arm: {row.seed for row in rows if row.arm == arm} for arm in arms}
    most = max(len(found) for found in seeds.values())
    waits = "" if reference in arms else ", and none of its runs is finished yet"
    sentences = [f"{len(rows)} runs of {len(arms)} arms; {reference} is the reference{waits}."]
    if fewer := [f"{arm} ({len(found)})" for arm, found in seeds.items() if len(found) < most]:
        sentences.append(f"With fewer than {most} seeds: {', '.join(fewer)}.")
    diverged = [f"{row.arm}, seed {row.seed}, rung {row.rung}" for row in rows if row.status == DIVERGED]
    sentences.append(f"Diverged: {'; '.join(diverged)}." if diverged else "No run diverged.")
    return sentences


def results_markdown(
    rows: Sequence[Row],
    predictions: Sequence[Prediction],
    picture: str,
    probe: Mapping[str, Any] | None = None,
    rates: Sequence[Row] = (),
) -> str:
    """The part of the project's page that is made from its numbers."""
    family = asked_arms(predictions, rows)
    results = arm_results(rows, family=family)
    parts = [
        f"![Gaps over tokens, and at the highest rung with their intervals]({picture})",
        " ".join([*facts(rows), _control(predictions, rows)]).strip(),
        " ".join(_rule_in_figures(rows, results, family)),
        "### At the highest rung\n\n" + markdown(*main_table(results)),
        "### Predictions and outcomes\n\n" + _counted(predictions, rows),
        markdown(*prediction_table(predictions, rows), left=("arm", "what", "outcome")),
        "### At every rung\n\n" + markdown(*rung_table(results)),
    ]
    if len({row.rung for row in rows}) > 1:
        head = "### Against each run of the reference\n\n"
        parts.append(head + markdown(*growth_table(rows), left=("arm", "to")))
    if shares(rows):
        head = "### The share of the forward pass\n\n"
        parts.append(head + markdown(*share_table(rows), left=("part", "of the gap of", "to")))
    if rates:
        parts.append(
            "### Learning rates\n\nHeld-out loss by learning rate.\n\n" + markdown(*rate_table(rates))
        )
    if probe is not None:
        parts.append("### What the probe says\n\n" + markdown(*probe_table(probe, results)))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def asked_arms(predictions: Sequence[Prediction], rows: Sequence[Row]) -> list[str]:
    """The arms that share the 5 %: those of which the plan asked, as far as they were run."""
    asked, reference = {one.arm for one in predictions}, rows[0].arm
    trained = dict.fromkeys(row.arm for row in rows)
    return [arm for arm in trained if arm in asked and not is_control(arm, reference)]


def _rule_in_figures(rows: Sequence[Row], results: Sequence[ArmResult], family: Sequence[str]) -> list[str]:
    """The family, the pooled deviation of each rung, and what the rule sees with that of the highest."""
    pooled: dict[int, Judgement] = {}
    for rung, found in ((one.rung, one.judgement) for one in results):
        if found is not None and found.degrees > (pooled[rung].degrees if rung in pooled else 0):
            pooled[rung] = found
    spreads = [found.spread.deviation for found in pooled.values() if found.spread is not None]
    if not family or not all(spreads) or not spreads:
        return []
    deviations = ", ".join(f"{spread:.2f}" for spread in spreads)
    unpaired = ", ".join(f"{unpaired_deviation(rows, rung):.2f}" for rung in pooled)
    last = pooled[max(pooled)]
    plan = Plan(last.seeds, spreads[-1], len(family))
    return [
        f"Verdicts and the column *all arms at once* are of {len(family)} arms: {', '.join(family)}.",
        f"Pooled over seeds and arms, gaps deviate by {deviations} % at the rungs ({last.degrees} degrees "
        f"of freedom); those of runs that share no seed would by {unpaired} %. By this rule {last.seeds} "
        f"seeds see a gap of {smallest_gap(plan):.2f} % in 8 of 10 cases at the highest rung, and to call an "
        f"arm equal within {MARGIN} % takes {seeds_for_equality(plan)} seeds.",
    ]


def _control(predictions: Sequence[Prediction], rows: Sequence[Row]) -> str:
    """Whether the positive control is resolved: the prediction whose reason says that it is one."""
    for one in predictions:
        if one.why == "the positive control":
            found, word = outcome(one, rows)
            if word == "not run":
                return "The positive control is not run yet."
            is_seen = found.low > 0 or found.high < 0
            result = "resolved" if is_seen else "not resolved, so no verdict counts"
            seeds = ends(found) if math.isfinite(found.low) else "one seed"
            gap = f"{percent(found.mean)} ({seeds})"
            return f"Positive control, {one.arm} to {one.against}: {gap}, {result}."
    return ""


def _counted(predictions: Sequence[Prediction], rows: Sequence[Row]) -> str:
    words = [outcome(one, rows)[1] for one in predictions]
    return ", ".join(f"{words.count(word)} {word}" for word in ("held", "wrong", "open", "not run")) + "."


def render_page(
    rows: Sequence[Row],
    parameters: int,
    probe: Mapping[str, Any] | None = None,
    reference: str = "",
    family: Collection[str] = (),
) -> str:
    """One HTML file: the picture, the tables, what diverged, and the probe beside them.

    `reference` is the arm that the others are compared with; "": that of the first row. `family` are the arms
    that the plan asks of; (): all but the reference and controls.
    """
    reference = reference or rows[0].arm
    results = arm_results(rows, reference, family, parameters)
    body = [f"<h1>Ladder</h1><p>{escape(' '.join(facts(rows, reference)))}</p>"]
    if results:
        body.append(ladder_svg(results, parameters, reference))
        body.append("<h2>At the highest rung</h2>" + html_table(*main_table(results)))
        body.append("<h2>At every rung</h2>" + html_table(*rung_table(results)))
    if probe is not None:
        body.append("<h2>What the probe says</h2>" + html_table(*probe_table(probe, results)))
    return plain_page("Ladder", body)

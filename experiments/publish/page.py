"""The part of docs/evidence.md that is made from its rows, as Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.trainer.experiment.power import Plan, seeds_for_equality, smallest_gap
from narrowgauge.trainer.report.page.rungs import facts
from narrowgauge.trainer.report.read.stored import Probe
from narrowgauge.trainer.report.table import ends, percent
from narrowgauge.trainer.report.verdict.rule import MARGIN, Judgement, is_control
from narrowgauge.trainer.report.verdict.verdict import Row, Verdict, row_verdicts
from publish.contrasts import shares, unpaired_deviation
from publish.predictions import Prediction, outcome
from publish.tables import (
    growth_table,
    lower_table,
    main_table,
    markdown,
    prediction_table,
    probe_table,
    rate_table,
    share_table,
)


def results_markdown(
    rows: Sequence[Row],
    predictions: Sequence[Prediction],
    picture: str,
    probe: Mapping[str, Any] | None = None,
    rates: Sequence[Row] = (),
) -> str:
    """The part of the page that is made from the rows."""
    family = asked_arms(predictions, rows)
    results = row_verdicts(rows, family=family, undecided="open")
    lower = [one for one in results if one.rung < max(row.rung for row in rows)]
    judged = [one for one in predictions if outcome(one, rows)[1] != "not run"]
    parts = [
        f"![Gaps over tokens, and at the highest rung with their intervals]({picture})",
        " ".join([*facts(rows), _control(predictions, rows)]).strip(),
        " ".join(_rule_in_figures(rows, results, family)),
        "### At the highest rung\n\n" + markdown(*main_table(results)),
        "### Predictions and outcomes\n\n" + _counted(predictions, rows),
        markdown(*prediction_table(judged, rows), left=("arm", "what", "outcome")),
    ]
    if lower:
        parts.append(
            "### At the lower rungs\n\nGaps, with the intervals of all arms at once.\n\n"
            + markdown(*lower_table(lower))
        )
        head, lines = growth_table(rows)
        if lines:
            parts.append("### Against the mean of both references\n\n" + markdown(head, lines))
    if shares(rows):
        head = "### The share of the forward pass\n\n"
        parts.append(head + markdown(*share_table(rows), left=("part", "of the gap of", "to")))
    if rates:
        parts.append(
            "### Learning rates\n\nHeld-out loss by learning rate.\n\n" + markdown(*rate_table(rates))
        )
    if probe is not None:
        trained = {arm: probe["recipes"][arm] for arm in _arms(rows) if arm in probe["recipes"]}
        parts.append("### The probe\n\n" + markdown(*probe_table(Probe(recipes=trained), results)))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _rule_in_figures(rows: Sequence[Row], results: Sequence[Verdict], family: Sequence[str]) -> list[str]:
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
        f"Verdicts and the column *all arms at once* cover {len(family)} arms: {', '.join(family)}.",
        f"Pooled over seeds and arms, gaps deviate by {deviations} % at the rungs ({last.degrees} degrees "
        f"of freedom); gaps between different seeds would deviate by {unpaired} %. By this rule {last.seeds} "
        f"seeds resolve a gap of {smallest_gap(plan):.2f} % in 8 of 10 cases at the highest rung; proving "
        f"an arm equal within {MARGIN} % takes {seeds_for_equality(plan)} seeds.",
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


def asked_arms(predictions: Sequence[Prediction], rows: Sequence[Row]) -> list[str]:
    """The arms that share the 5 %: the plan's arms, as far as they were run."""
    asked, reference = {one.arm for one in predictions}, rows[0].arm
    return [arm for arm in _arms(rows) if arm in asked and not is_control(arm, reference)]


def _arms(rows: Sequence[Row]) -> list[str]:
    """The arms that were trained, in the order of their first runs."""
    return list(dict.fromkeys(row.arm for row in rows))

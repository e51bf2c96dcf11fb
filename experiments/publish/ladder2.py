"""The part of docs/evidence.md that is made from its rows, as Markdown."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.trainer.experiment.power import Plan, smallest_gap
from narrowgauge.trainer.report.table import ends, percent
from narrowgauge.trainer.report.verdict.rule import is_control
from narrowgauge.trainer.report.verdict.verdict import Row, Verdict, gap_percent, row_verdicts
from publish.pilot import LEAST_SEEDS, Design, choose, measure
from publish.predictions import Prediction, outcome
from publish.tables import markdown, mean, prediction_table

REFERENCE = "bf16"
MARGIN = 0.1  # percent, within which an arm is equal; fixed before the runs


def pilot_markdown(rows: Mapping[str, Sequence[Row]]) -> str:
    """The table of designs, and which of them the rule chooses."""
    found = {name: one for name, these in rows.items() if (one := measure(name, these)) is not None}
    head = ("design", "seeds", "loss of bf16", "deviation of a pair", "95 %", "8 bits", "MXFP4", "signal")
    table = markdown(head, [_design_cells(one) for one in found.values()], left=("design",))
    for name, these in rows.items():
        if name not in found and (gaps := _gaps(these)):
            table += f"\nOf `{name}` some arms are not planned or not done; gaps (bf16 forward): {gaps}.\n"
    chosen = choose(found)
    if chosen is None:
        few = [one.name for one in found.values() if one.seeds < LEAST_SEEDS]
        return f"{table}\nThe pilot is not finished: fewer than {LEAST_SEEDS} seeds of {', '.join(few)}.\n"
    return f"{table}\nThe rule chooses `{chosen.name}`.\n"


def _gaps(rows: Sequence[Row]) -> str:
    """The gaps of a design whose seeds lack arms, as far as there are any."""
    base = {row.seed: row.bf16_loss for row in rows if row.arm == REFERENCE}
    return ", ".join(
        f"{row.arm} {percent(gap_percent(row.bf16_loss, base[row.seed]))} (seed {row.seed})"
        for row in rows
        if row.arm != REFERENCE and row.seed in base
    )


def _design_cells(one: Design) -> list[str]:
    return [
        one.name,
        str(one.seeds),
        f"{one.loss:.4f}",
        f"{one.deviation:.3f} %",
        f"{one.low:.3f} .. {one.high:.3f} %",
        percent(one.eight),
        percent(one.four),
        f"{one.signal:.1f}",
    ]


def family_of(tables: Mapping[str, Any]) -> list[str]:
    """The arms of a part that share the 5 %: all that it trains, without the reference and controls."""
    return [arm for arm in tables["arms"] if arm != REFERENCE and not is_control(arm, REFERENCE)]


def stages_markdown(
    parts: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Sequence[Row]],
    predictions: Sequence[Prediction],
) -> str:
    """A section for each part that has rows, then the predictions that are decided.

    Args:
        parts: The tables of each part, in the order of the rungs of the predictions.
        rows: The rows of each part.
        predictions: The predictions of ladder 2.
    """
    sections, numbered = [_progress(parts, rows)], []
    for number, (name, tables) in enumerate(parts.items(), start=1):
        if these := rows.get(name):
            sections.append(_section(name, tables, these))
            numbered += [row._replace(rung=number) for row in these]
    return "\n".join([*sections, _judged(predictions, numbered)])


def _judged(predictions: Sequence[Prediction], rows: Sequence[Row]) -> str:
    """How many predictions held, and a table of those that are decided."""
    words = [outcome(one, rows)[1] for one in predictions]
    counted = ", ".join(f"{words.count(word)} {word}" for word in ("held", "wrong", "open", "not run"))
    text = f"### Predictions\n\n{counted}.\n"
    decided = [one for one, word in zip(predictions, words, strict=True) if word in ("held", "wrong")]
    if not decided:
        return text
    head, lines = prediction_table(decided, rows)
    return f"{text}\n{markdown(head, lines, left=('arm', 'what', 'outcome'))}"


def _progress(parts: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Sequence[Row]]) -> str:
    """How many of the planned runs have a row."""
    lines = []
    for name, tables in parts.items():
        arms, seeds = len(tables["arms"]), len(tables["experiment"]["seeds"])
        sizes = f"{tokens_of(tables) / 1e6:.2f} M", f"{tables['experiment']['held_out_tokens']:,}"
        lines.append([name, *sizes, *map(str, (arms, seeds, arms * seeds, len(rows.get(name, ()))))])
    head = ("part", "tokens of a run", "held-out tokens", "arms", "seeds", "runs", "done")
    return markdown(head, lines, left=("part",))


def tokens_of(tables: Mapping[str, Any]) -> int:
    """The tokens of a run of a part."""
    (steps,) = tables["experiment"]["rungs"]
    return int(steps * tables["training"]["batch_size"] * tables["data"]["sequence_length"])


def _section(name: str, tables: Mapping[str, Any], rows: Sequence[Row]) -> str:
    family = family_of(tables)
    results = row_verdicts(rows, REFERENCE, family, undecided="open")
    results.sort(key=lambda one: math.inf if math.isnan(one.individual.mean) else one.individual.mean)
    head = ("arm", "seeds", "gap", "95 %, all arms at once", "bf16 forward", "verdict")
    lines = [
        [
            one.name,
            str(len(one.gaps)),
            percent(one.individual.mean),
            ends(one.at_once),
            percent(mean(one.bf16_gaps)),
            verdict(one),
        ]
        for one in results
    ]
    losses = [row.own_loss for row in rows if row.arm == REFERENCE]
    text = f"### Part {name}\n\n"
    if losses:
        text += f"bf16 ends at {statistics.fmean(losses):.4f} nats (seeds: {len(losses)}). "
    text += (
        f"The family has {len(family)} arms. {_sight(results, len(tables['experiment']['seeds']), family)}"
    )
    table = markdown(head, lines, left=("arm", "verdict")) if lines else ""
    return f"{text.rstrip()}\n\n{table}"


def verdict(one: Verdict) -> str:
    """The verdict with this experiment's margin: worse, better, equal within it, diverges, or open."""
    if one.diverged:
        return "diverges"
    found = one.judgement
    if found is None or found.half_width is None:
        return "open"
    equal = f"within {MARGIN} %" if found.is_within(MARGIN) else ""
    if found.is_different:
        return ", ".join(filter(None, ["worse" if found.mean > 0 else "better", equal]))
    return f"equal {equal}" if equal else "open"


def _sight(results: Sequence[Verdict], seeds: int, family: Sequence[str]) -> str:
    """What the planned seeds will see with the deviation measured so far."""
    spreads = [one.judgement for one in results if one.judgement is not None and one.judgement.spread]
    widest = max(spreads, key=lambda one: one.degrees, default=None)
    if widest is None or widest.spread is None or not widest.spread.deviation:
        return "One seed gives no deviation."
    return sight(widest.spread.deviation, seeds, len(family), f" ({widest.degrees} degrees of freedom)")


def sight(deviation: float, seeds: int, family: int, degrees: str = "") -> str:
    """What a plan sees if gaps deviate by `deviation` percent."""
    plan = Plan(seeds, deviation, family)
    chance = 100 * plan.chance_to_equal(MARGIN)
    return (
        f"Gaps deviate by {deviation:.3f} %{degrees}. With {family} arms, {seeds} seeds detect a gap of "
        f"{smallest_gap(plan):.2f} % in 8 of 10 cases, and have a {chance:.0f} % chance of confirming "
        f"equality within {MARGIN} %."
    )

"""Tables of docs/evidence.md that no other experiment has: predictions, learning rates, contrasts."""

import math
import statistics
from collections.abc import Sequence

from narrowgauge.system.units import human_count
from narrowgauge.trainer.report.page.rungs import agreement
from narrowgauge.trainer.report.read.stored import Probe
from narrowgauge.trainer.report.table import ends, percent
from narrowgauge.trainer.report.verdict.verdict import Row, Verdict
from publish.contrasts import MEAN, growth, share_cells, shares
from publish.predictions import Prediction, outcome

COLUMNS = (
    *("arm", "tokens", "seeds", "gap", "95 % interval", "all arms at once", "deviation"),
    *("bf16 forward", "extra tokens", "verdict"),
)
PROBED = {
    "loss_increase": ("loss increase", ".4f"),
    "gradient_cosine": ("cosine", ".3f"),
    "effective_bits": ("effective bits", ".1f"),
    "averaging_slope": ("averaging slope", ".2f"),
    "noise_ratio": ("gradient / noise", ".1f"),
}
Table = tuple[Sequence[str], list[list[str]]]  # head, lines
PREDICTED = ("arm", "what", "predicted", "measured", "95 % interval", "outcome")


def markdown(
    head: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str] = ("arm", "verdict")
) -> str:
    """A table in Markdown; columns that are not `left` are set to the right."""
    rule = [":---" if column in left else "---:" for column in head]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines)) + "\n"


def main_table(results: Sequence[Verdict]) -> Table:
    """The highest rung: arm, gap, interval and what belongs to it, the smallest gap first."""
    last = max((result.rung for result in results), default=0)
    top = [result for result in results if result.rung == last]
    top.sort(key=lambda r: math.inf if math.isnan(r.individual.mean) else r.individual.mean)
    return COLUMNS, [_cells(result) for result in top]


def _cells(one: Verdict) -> list[str]:
    """The texts of a line, by `COLUMNS`."""
    gaps = list(one.gaps.values())
    deviation = statistics.stdev(gaps) if len(gaps) > 1 else math.nan
    return [
        one.name,
        human_count(one.tokens),
        str(len(gaps)) + (f" + {one.diverged} diverged" if one.diverged else ""),
        percent(one.individual.mean),
        ends(one.individual),
        ends(one.at_once),
        percent(deviation).removeprefix("+"),
        percent(mean(one.bf16_gaps)),
        percent(mean(one.extra), 1),
        one.conclusion,
    ]


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def lower_table(results: Sequence[Verdict]) -> Table:
    """A line for each arm: its gap at each rung, with the interval of all arms at once."""
    tokens = sorted({result.tokens for result in results})
    found = {(r.name, r.tokens): f"{percent(r.individual.mean)} ({ends(r.at_once)})" for r in results}
    lines = [
        [arm, *(found.get((arm, count), "-") for count in tokens)]
        for arm in dict.fromkeys(a for a, _ in found)
    ]
    return ("arm", *map(human_count, tokens)), lines


def prediction_table(predictions: Sequence[Prediction], rows: Sequence[Row]) -> Table:
    """Each prediction with its outcome."""
    lines = []
    for one in predictions:
        found, word = outcome(one, rows)
        span = f"{_end(one.low)} .. {_end(one.high)}"
        lines.append([one.arm, one.what, span, percent(found.mean), ends(found), word])
    return PREDICTED, lines


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
    """Each arm against the mean of the runs of the reference: gap at the highest rung, and growth."""
    low, high = (of(row.rung for row in rows) for of in (min, max))
    head = ("arm", f"gap, rung {high}", "95 % interval", f"growth since rung {low}", "95 % interval")
    lines = [
        [arm, percent(gap.mean), ends(gap), percent(more.mean), ends(more)]
        for arm, reference, gap, more in growth(rows)
        if reference == MEAN
    ]
    return head, lines


def share_table(rows: Sequence[Row]) -> Table:
    """The part of a whole recipe's gap that its forward pass alone has."""
    lines = [
        [part, whole, reference, *share_cells(share, by_seed)]
        for part, whole, reference, share, by_seed in shares(rows)
    ]
    return ("part", "of the gap of", "to", "share", "95 % interval", "by seed, %"), lines


def probe_table(probe: Probe, results: Sequence[Verdict] = ()) -> Table:
    """The figures of the probe for each arm's recipe, and their agreement with the gaps of each rung."""
    lines = []
    for arm in probe.recipes:
        means = [(probe.mean(arm, key), form) for key, (_, form) in PROBED.items()]
        lines.append([arm, *("-" if mean is None else f"{mean:{form}}" for mean, form in means)])
    head = ("arm", *(title for title, _ in PROBED.values()))
    return head, [*lines, *agreement(probe, results, [*PROBED])]


def _end(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else "∞"

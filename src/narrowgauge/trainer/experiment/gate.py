"""An acceptance test: whether the loss of a variant is close enough to that of the reference.

A gate is the largest acceptable gap: in nats per token ("0.01"), or in percent of the reference's loss
("0.25%"). The gaps of a variant are its verdict's: one per seed, paired and at equal tokens, and the
interval is that of the verdict, by the same `rule`.

    fail    a run has diverged or failed, or the gap exceeds the gate for every seed, or the interval does
    pass    the interval ends at the gate or below it
    open    neither: there are too few seeds; the reason gives the number that would decide

For one variant, an interval inside -gate .. gate is equivalence by two one-sided tests at 2.5 % each
(Schuirmann 1987). Here only the upper test decides: a low loss is not a reason to refuse a recipe. A variant
that is better by more than the gate passes with a remark, because such a gain has a cause to look for.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.rule import Judgement
from narrowgauge.trainer.report.verdict.verdict import Verdict, verdicts

_MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Gate:
    """The largest acceptable gap, in nats or in percent."""

    limit: float
    in_percent: bool

    def show(self, gap: float) -> str:
        """A gap in the gate's unit, with its sign."""
        return f"{gap:+.3f} %" if self.in_percent else f"{gap:+.4f} nats"

    def __str__(self) -> str:
        return f"{self.limit:g} %" if self.in_percent else f"{self.limit:g} nats"


@dataclass(frozen=True, slots=True)
class GateResult:
    """The decision on one variant, "pass", "fail" or "open", and its reason."""

    name: str
    word: str
    reason: str


def parse_gate(text: str) -> Gate:
    """Parse a gate, such as "0.01" (nats) or "0.25%"."""
    number, percent, rest = text.strip().partition("%")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if rest or not 0 < limit < math.inf:
        raise UserError(
            f"--gate {text} must be a number above 0: nats a token, as in 0.01, or percent, as in 0.25%"
        )
    return Gate(limit, bool(percent))


def gate_results(runs: Sequence[Run], gate: Gate) -> list[GateResult]:
    """The decision on each variant except the reference, which is the first run's variant."""
    reference, *others = verdicts(runs, gate.in_percent)
    if not others:
        raise UserError(
            "--gate compares variants with a reference, and there is one variant; name two recipes"
        )
    return [_judge(one, reference, gate) for one in others]


def _judge(one: Verdict, reference: Verdict, gate: Gate) -> GateResult:
    decided, judgement, gaps = partial(GateResult, one.name), one.judgement, list(one.gaps.values())
    for word, of in (("fail", one), ("open", reference)):
        for run in of.runs.values():
            if run.has_failed:
                return decided(word, f"{run.name} failed: {run.reason}")
    if judgement is None:
        return decided("open", f"no seed has losses at equal tokens with {reference.name}")
    if not all(map(math.isfinite, gaps)):
        if all(map(math.isfinite, one.losses)):
            return decided("open", f"a loss of {reference.name} is not finite")
        return decided("fail", "a loss is not finite")
    mean, half, interval = judgement.mean, judgement.half_width, ""
    if half is not None:
        interval = f" ({gate.show(mean - half).rpartition(' ')[0]} .. {gate.show(mean + half)})"
    text = f"gap {gate.show(mean)}{interval}, {len(gaps)} seed{'s' * (len(gaps) != 1)}"
    if min(gaps) > gate.limit:
        return decided("fail", f"{text}, above the gate for every seed")
    if half is None:
        return decided("open", f"{text}: one seed has no interval; add --seeds 3")
    if mean - half > gate.limit:
        return decided("fail", f"{text}, above the gate")
    if mean + half <= gate.limit:
        gain = ", better by more than the gate: look for the cause" if mean + half < -gate.limit else ""
        return decided("pass", text + gain)
    return decided("open", f"{text}: {_seeds_needed(judgement, gate.limit)}")


def _seeds_needed(found: Judgement, limit: float) -> str:
    """The number of seeds with this mean and spread that would decide."""
    counts = range(found.seeds + 1, _MOST_SEEDS + 1)
    room = abs(limit - found.mean)
    at = bisect_left(counts, True, key=lambda seeds: found.half_width_of(seeds) <= room)
    if at < len(counts):
        return f"about {counts[at]} seeds of this spread would decide"
    return f"the gap lies at the gate itself, and {_MOST_SEEDS} seeds would not decide"

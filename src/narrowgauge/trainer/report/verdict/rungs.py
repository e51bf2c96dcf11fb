"""The results of a measured experiment: a row for each run, and the paired gaps, verdicts and extra tokens.

    arm,seed,rung,tokens,own_loss,bf16_loss,status

A row has the losses in nats per token, with six decimals, on the held-out tokens: with the arm's forward
pass, and with a bf16 forward pass of the same weights. A run that diverged has no losses. Unfinished runs
have no row.

    gap         100 (L / L_reference - 1) of one seed and rung: same initial weights, same tokens in order
    verdict     by the `rule` of all comparisons, over the arms of a rung at once
    extra       the percentage of tokens that the arm needs beyond the reference's to reach its loss

For the extra tokens, the reference's loss with the same seed is read off as a function of its tokens D:
between two rungs ln L is linear in ln D, and outside them the line through the nearest two rungs is
extended. If D' is where the reference has the arm's loss at D, the extra tokens are 100 (D / D' - 1).
"""

import csv
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.report.verdict.rule import UNDECIDED, Judgement, is_control, judge, known_deviation

COLUMNS = ("arm", "seed", "rung", "tokens", "own_loss", "bf16_loss", "status")
DONE, DIVERGED = "done", "diverged"
NAN = math.nan


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one run; NaN losses if it diverged."""

    arm: str
    seed: int
    rung: int
    tokens: int
    own_loss: float
    bf16_loss: float
    status: str

    def loss(self, which: str) -> float:
        """The loss called "own" or "bf16"."""
        return self.own_loss if which == "own" else self.bf16_loss


def rows_text(rows: Sequence[Row]) -> str:
    """The rows as the text of a CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        losses = ["" if math.isnan(x) else f"{x:.6f}" for x in (row.own_loss, row.bf16_loss)]
        writer.writerow([row.arm, row.seed, row.rung, row.tokens, *losses, row.status])
    return text.getvalue()


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV.

    Raises:
        UserError: the file cannot be read, or is another table.
    """
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; name a runs.csv that `compare` wrote") from None
    if not lines or tuple(lines[0]) != COLUMNS:
        raise UserError(
            f"{path} does not begin with {','.join(COLUMNS)}; name a runs.csv that `compare` wrote"
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            arm, seed, rung, tokens, own, bf16, status = line
            own_loss, bf16_loss = (float(x) if x else NAN for x in (own, bf16))
            rows.append(Row(arm, int(seed), int(rung), int(tokens), own_loss, bf16_loss, status))
        except ValueError:
            raise UserError(f"{path}, line {number}: {','.join(line)!r} is not a row; correct it") from None
    return rows


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm at one rung against the reference; gaps in percent, by seed.

    Attributes:
        gaps: With the arm's forward pass, for the seeds that both arms have.
        bf16_gaps: With the bf16 forward pass of the same weights, for both arms.
        gap: Mean and Student's interval of `gaps` alone; NaN without any.
        extra: Mean and interval of the extra tokens in percent; NaN with a single rung.
        diverged: The number of seeds that diverged.
        judgement: The judgement of the gaps among the other arms of the rung; None without any.
        undecided: The verdict if the interval includes zero.
    """

    arm: str
    rung: int
    tokens: int
    gaps: Mapping[int, float]
    bf16_gaps: tuple[float, ...]
    gap: Interval
    bf16_gap: Interval
    extra: Interval
    diverged: int
    judgement: Judgement | None = None
    undecided: str = UNDECIDED

    @property
    def at_once(self) -> Interval:
        """The interval that holds for all arms of the rung at once, on which the verdict is based."""
        half = None if self.judgement is None else self.judgement.half_width
        half = NAN if half is None else half
        return Interval(self.gap.mean, self.gap.mean - half, self.gap.mean + half)

    @property
    def deviation(self) -> float:
        """Standard deviation of the gaps; NaN for fewer than two."""
        return statistics.stdev(self.gaps.values()) if len(self.gaps) > 1 else NAN

    @property
    def verdict(self) -> str:
        """The verdict by the rule; "diverges" if a run diverged."""
        if self.diverged:
            return "diverges"
        return "open" if self.judgement is None else self.judgement.word(self.undecided)


def arm_results(
    rows: Sequence[Row],
    reference: str = "",
    family: Collection[str] = (),
    parameters: int = 0,
    undecided: str = UNDECIDED,
    is_quiet: bool = False,
) -> list[ArmResult]:
    """The results of all arms but the reference, by rung and arm.

    Args:
        rows: The results of runs.
        reference: The arm that the others are compared with; "" for that of the first row.
        family: The arms that the plan compares, which share the 5 %; () for all except reference and
            controls.
        parameters: Parameters in linear layers, which give the length of runs; 0 to judge by the rows alone.
        undecided: The verdict on arms whose interval includes zero.
        is_quiet: Whether no warm-up spikes, as far as is known (`known_deviation`).
    """
    if not rows:
        return []
    by_key = {(row.arm, row.seed, row.rung): row for row in rows}
    reference = reference or rows[0].arm
    arms = [arm for arm in dict.fromkeys(row.arm for row in rows) if arm != reference]
    family = family or [arm for arm in arms if not is_control(arm, reference)]
    results = []
    for rung in sorted({row.rung for row in rows}):
        found = [one for arm in arms if (one := _result(by_key, reference, arm, rung)) is not None]
        known = known_deviation(found[0].tokens / parameters, is_quiet) if found and parameters else 0.0
        judged = judge({one.arm: one.gaps for one in found}, family, known)
        results += [replace(one, judgement=judged.get(one.arm), undecided=undecided) for one in found]
    return results


def _result(
    by_key: Mapping[tuple[str, int, int], Row], reference: str, arm: str, rung: int
) -> ArmResult | None:
    rows = [row for (a, _, r), row in by_key.items() if a == arm and r == rung]
    pairs = [
        (row, base)
        for row in rows
        if (base := by_key.get((reference, row.seed, rung))) is not None
        and DIVERGED not in (row.status, base.status)
    ]
    diverged = sum(row.status == DIVERGED for row in rows)
    if not pairs and not diverged:
        return None
    gaps = {row.seed: gap_percent(row.own_loss, base.own_loss) for row, base in pairs}
    bf16 = tuple(gap_percent(row.bf16_loss, base.bf16_loss) for row, base in pairs)
    curves = {row.seed: _curve(by_key, reference, row.seed) for row, _ in pairs}
    extra = [extra_tokens(row.own_loss, row.tokens, curves[row.seed]) for row, _ in pairs]
    known = [x for x in extra if math.isfinite(x)]
    tokens = rows[0].tokens
    gap, bf16_gap, more = _interval(list(gaps.values())), _interval(bf16), _interval(known)
    return ArmResult(arm, rung, tokens, gaps, bf16, gap, bf16_gap, more, diverged)


def _interval(values: Sequence[float]) -> Interval:
    return interval(values) if values else Interval(NAN, NAN, NAN)


def gap_percent(loss: float, reference: float) -> float:
    """The excess of a loss in percent."""
    return 100 * (loss / reference - 1)


def _curve(by_key: Mapping[tuple[str, int, int], Row], arm: str, seed: int) -> list[tuple[float, float]]:
    """(tokens, loss) of an arm and seed at its rungs, ascending."""
    rows = [row for (a, s, _), row in by_key.items() if (a, s) == (arm, seed) and row.status != DIVERGED]
    return sorted((row.tokens, row.own_loss) for row in rows)


def extra_tokens(loss: float, tokens: int, curve: Sequence[tuple[float, float]]) -> float:
    """By how many percent `tokens` exceed those at which the curve has `loss`; NaN if undetermined.

    >>> round(extra_tokens(2.0, 4, [(1, 4.0), (4, 2.0), (16, 1.0)]), 6)
    0.0
    >>> round(extra_tokens(2.0, 8, [(1, 4.0), (4, 2.0), (16, 1.0)]), 6)
    100.0
    """
    points = [(math.log(d), math.log(value)) for d, value in curve]
    if len(points) < 2 or not loss > 0:
        return NAN
    y = math.log(loss)
    pieces = list(pairwise(points))
    left, right = next((piece for piece in pieces if y >= piece[1][1]), pieces[-1])  # that falls to y
    slope = (right[1] - left[1]) / (right[0] - left[0])
    if slope >= 0:
        return NAN
    return 100 * (tokens / math.exp(left[0] + (y - left[1]) / slope) - 1)

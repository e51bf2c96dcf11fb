"""The verdict on each arm at each rung: its gaps to the reference in pairs, judged by the one `rule`.

A seed determines a run's initial weights and the order of its tokens, so two runs with the same seed share
most of their luck, and the gap is measured in pairs: gap_i = 100 (loss_i / reference_i - 1) at equal tokens
for each seed i. The verdict is on the mean of these gaps: their deviation is pooled over the arms of a rung,
and intervals hold for all of them at once.

A comparison by seeds has one rung, and its gaps are those of run directories (`verdicts`). An experiment at
several lengths also has rows, from which `row_verdicts` takes gaps at each rung, those of a bf16
forward pass, and the extra tokens: the percentage that the arm needs beyond the reference's to reach its
loss. The reference's loss with the same seed is read off as a function of its tokens D: between two rungs
ln L is linear in ln D, and outside them the line through the nearest two rungs is extended. If D' is where
the reference has the arm's loss at D, the extra tokens are 100 (D / D' - 1).

A file of rows has one for each run that has ended:

    arm,seed,rung,tokens,own_loss,bf16_loss,status

with the losses in nats per token, to six decimals, on the held-out tokens: with the arm's forward pass, and
with a bf16 forward pass of the same weights. A run that diverged has no losses.

One seed has a gap but no interval. The spread of the gap along one curve (a block bootstrap over its steps)
cannot replace it: two trajectories that have separated stay apart. With 8 seeds of a tiny model it measured
0.002 for the mean gap of the last 100 of 300 steps, while the seeds spread by 0.010 (mxfp8) and 0.017
(mxfp4).
"""

import csv
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.report.read.records import warmup_spikes
from narrowgauge.trainer.report.read.run import ENDED, Run
from narrowgauge.trainer.report.verdict.groups import Gap, Verdict, gap_to, groups
from narrowgauge.trainer.report.verdict.rule import UNDECIDED, is_control, judge, known_deviation

COLUMNS = ("arm", "seed", "rung", "tokens", "own_loss", "bf16_loss", "status")
DONE, DIVERGED = "done", "diverged"


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

    @property
    def key(self) -> tuple[str, int, int]:
        """Its arm, seed and rung."""
        return self.arm, self.seed, self.rung


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
    """The rows of a CSV."""
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
            own_loss, bf16_loss = (float(x) if x else math.nan for x in (own, bf16))
            rows.append(Row(arm, int(seed), int(rung), int(tokens), own_loss, bf16_loss, status))
        except ValueError:
            raise UserError(f"{path}, line {number}: {','.join(line)!r} is not a row; correct it") from None
    return rows


def verdicts(runs: Sequence[Run], in_percent: bool = True) -> list[Verdict]:
    """One verdict for each variant, the reference first; its gaps are in percent, or in nats.

    The family that shares the 5 % consists of the variants without the reference and controls.
    """
    all_groups = groups(runs)
    reference = all_groups[0]
    pairs = [{} if group is reference else _pairs(group, reference) for group in all_groups]
    gaps = [{s: gap.percent if in_percent else gap.nats for s, gap in of.items()} for of in pairs]
    family = [number for number, group in enumerate(all_groups) if number and not group.is_control]
    known = known_of(runs)
    if not in_percent:
        known *= next(iter(reference.losses), 0.0) / 100
    found = judge(dict(enumerate(gaps)), family, known)
    return [
        replace(
            group,
            gaps=gaps[number],
            judgement=found.get(number),
            is_reference=group is reference,
            is_done=all(run.status == "done" for run in group.runs.values())
            and all(reference.runs[seed].status in ENDED for seed in gaps[number]),
            tokens=max((gap.tokens for gap in pairs[number].values()), default=0),
        )
        for number, group in enumerate(all_groups)
    ]


def _pairs(group: Verdict, reference: Verdict) -> dict[int, Gap]:
    """The gap of each seed that both have, with losses at equal tokens.

    If a run of several failed, there are none, since the remaining seeds are the lucky ones.
    """
    if any(one.has_failed and len(one.runs) > 1 for one in (group, reference)):
        return {}
    return {
        seed: gap
        for seed, run in group.runs.items()
        if seed in reference.runs
        and (gap := gap_to(run, reference.runs[seed], reference.by_validation)) is not None
    }


def known_of(runs: Sequence[Run]) -> float:
    """The known deviation of runs as long as the first; 0 if its model is unknown.

    They have a quiet warm-up if all have recorded their warm-up, and none spikes there.
    """
    if not (size := size_of(runs[0])):
        return 0.0
    is_quiet = all(one.steps and not warmup_spikes(one.steps) for one in runs)
    return known_deviation(runs[0].tokens / size, is_quiet)


def size_of(run: Run) -> int:
    """The weights of the blocks of a run's model; 0 if it is unknown."""
    section = run.config.get("model", {})
    try:
        return count_block_weights(model_config(**{key: v for key, v in section.items() if key != "weights"}))
    except (UserError, TypeError, AttributeError):
        return 0


def row_verdicts(
    rows: Sequence[Row],
    reference: str = "",
    family: Collection[str] = (),
    parameters: int = 0,
    undecided: str = UNDECIDED,
    is_quiet: bool = False,
) -> list[Verdict]:
    """The verdicts on all arms but the reference, by rung and arm.

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
    reference = reference or rows[0].arm
    arms = [arm for arm in dict.fromkeys(row.arm for row in rows) if arm != reference]
    family = family or [arm for arm in arms if not is_control(arm, reference)]
    found = []
    for rung in sorted({row.rung for row in rows}):
        here = [one for arm in arms if (one := _of_rows(rows, reference, arm, rung)) is not None]
        known = known_deviation(here[0].tokens / parameters, is_quiet) if here and parameters else 0.0
        judged = judge({one.name: one.gaps for one in here}, family, known)
        found += [replace(one, judgement=judged.get(one.name), undecided=undecided) for one in here]
    return found


def _of_rows(rows: Sequence[Row], reference: str, arm: str, rung: int) -> Verdict | None:
    """The pairs of an arm at a rung, not judged yet; None without any."""
    mine = {row.seed: row for row in rows if (row.arm, row.rung) == (arm, rung)}
    finished = [row for row in rows if row.arm == reference and row.status != DIVERGED]
    base = {row.seed: row for row in finished if row.rung == rung}
    paired = [seed for seed, row in mine.items() if row.status != DIVERGED and seed in base]
    diverged = sum(row.status == DIVERGED for row in mine.values())
    if not paired and not diverged:
        return None
    curves = {s: sorted((row.tokens, row.own_loss) for row in finished if row.seed == s) for s in paired}
    extra = [extra_tokens(mine[seed].own_loss, mine[seed].tokens, curves[seed]) for seed in paired]
    return Verdict(
        name=arm,
        runs={},
        is_control=is_control(arm, reference),
        by_validation=True,
        gaps={seed: gap_percent(mine[seed].own_loss, base[seed].own_loss) for seed in paired},
        tokens=next(iter(mine.values())).tokens,
        rung=rung,
        bf16_gaps=[gap_percent(mine[seed].bf16_loss, base[seed].bf16_loss) for seed in paired],
        extra=[x for x in extra if math.isfinite(x)],
        diverged=diverged,
    )


def gap_percent(loss: float, reference: float) -> float:
    """The excess of a loss in percent."""
    return 100 * (loss / reference - 1)


def extra_tokens(loss: float, tokens: int, curve: Sequence[tuple[float, float]]) -> float:
    """By how many percent `tokens` exceed those at which the curve has `loss`; NaN if undetermined.

    >>> round(extra_tokens(2.0, 4, [(1, 4.0), (4, 2.0), (16, 1.0)]), 6)
    0.0
    >>> round(extra_tokens(2.0, 8, [(1, 4.0), (4, 2.0), (16, 1.0)]), 6)
    100.0
    """
    points = [(math.log(d), math.log(value)) for d, value in curve]
    if len(points) < 2 or not loss > 0:
        return math.nan
    y = math.log(loss)
    pieces = list(pairwise(points))
    left, right = next((piece for piece in pieces if y >= piece[1][1]), pieces[-1])  # that falls to y
    slope = (right[1] - left[1]) / (right[0] - left[0])
    if slope >= 0:
        return math.nan
    return 100 * (tokens / math.exp(left[0] + (y - left[1]) / slope) - 1)


def with_runs(of_rows: Sequence[Verdict], of_runs: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of an experiment: on its runs at the highest rung, by rows if there are any, and below."""
    last = max((one.rung for one in of_rows), default=1)
    top = {one.name: one for one in of_rows if one.rung == last}
    here = [
        replace(top.pop(one.name), runs=one.runs, is_done=one.is_done)
        if one.name in top
        else replace(one, rung=last)
        for one in of_runs
    ]
    return [*here, *top.values(), *(one for one in of_rows if one.rung < last)]

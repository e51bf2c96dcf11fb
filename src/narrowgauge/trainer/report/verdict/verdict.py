"""The verdict on each arm at each rung: its gaps to the reference in pairs, judged by the one `rule`.

Runs that differ only in `training.seed`, or in the threads that they pin, are one variant; the first run's
variant is the reference. A seed determines a run's initial weights and the order of its tokens, so two runs
with the same seed share most of their luck, and the gap is measured in pairs: gap_i = 100 (loss_i /
reference_i - 1) for each seed i. Losses fall with every token, so they are compared at the last number of
tokens at which both runs were measured. The verdict is on the mean of these gaps: their deviation is pooled
over the arms of a rung, and intervals hold for all of them at once.

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

**Held-out tokens.** Two runs are validated on the same tokens, but what separates them differs from token to
token. With d_j the difference of their losses on part j of m equal parts, the sampling error of the gap is

    stdev(d_j) / sqrt(m) / reference loss

It is a share of the deviation between seeds. More seeds average it away as well, at the price of whole
trainings; more held-out tokens cost a forward pass each, and n times as many divide it by sqrt(n). In
ladder 2 (docs/evidence.md) the gaps of 8-bit arms deviate by 0.10 % on 65,536 tokens, of which 0.06 % is
this error, and by 0.06 % on 16 times as many.
"""

import csv
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from narrowgauge.system.errors import UserError
from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.report.read.records import warmup_spikes
from narrowgauge.trainer.report.read.run import ENDED, FINAL_STEPS, Run
from narrowgauge.trainer.report.verdict.rule import UNDECIDED, Judgement, is_control, judge, known_deviation

DONE, DIVERGED = "done", "diverged"
LEAST_PARTS = 4  # of held-out tokens
_AGAIN = " again"


@dataclass(frozen=True)
class Verdict:
    """One arm at one rung against the reference, in percent; the rows of another machine have no runs."""

    name: str  # the name of the variant: that of its runs, without their seeds
    runs: dict[int, Run]  # its runs by seed, in the given order
    partners: Mapping[int, Run]  # the reference's runs by seed; {} for the reference
    is_control: bool  # whether it repeats the reference's configuration, or has the name of a control
    by_validation: bool  # whether losses are those of validations, as the reference has them, or of steps
    gaps: Mapping[int, float] = field(default_factory=dict)  # by seed, at equal tokens; none if a run failed
    judgement: Judgement | None = None  # of the gaps; None without any
    is_reference: bool = False  # whether it is the reference itself
    is_done: bool = True  # all runs are done, and the reference's have ended: the verdict is final
    tokens: int = 0  # the most tokens of a pair; 0 without any
    rung: int = 1  # the index of its length, from 1
    bf16_gaps: Sequence[float] = ()  # with a bf16 forward pass of the same weights, for both arms
    extra: Sequence[float] = ()  # the extra tokens of each seed, where they are determined
    diverged: int = 0  # the number of seeds that diverged, by the rows
    undecided: str = UNDECIDED  # the conclusion if the interval includes zero

    def pair(self, seed: int) -> "Gap | None":
        """The gap of a seed's run to the reference's; None without one, or without equal tokens."""
        if (partner := self.partners.get(seed)) is None:
            return None
        return gap_to(self.runs[seed], partner, self.by_validation)

    @property
    def has_failed(self) -> bool:
        """Whether a run failed or diverged."""
        return bool(self.diverged) or any(run.has_failed for run in self.runs.values())

    @property
    def kind(self) -> str:
        """The loss by which runs are compared."""
        return "final_val_loss" if self.by_validation else "final_train_loss"

    @property
    def losses(self) -> list[float]:
        """The last losses of the runs that have one."""
        return [loss for run in self.runs.values() if (loss := getattr(run, self.kind)) is not None]

    @property
    def gap(self) -> float | None:
        """Mean over the paired seeds."""
        return None if self.judgement is None else self.judgement.mean

    @property
    def half_width(self) -> float | None:
        """Half the interval of the gap, for all arms at once; None for one seed."""
        return None if self.judgement is None else self.judgement.half_width

    @property
    def at_once(self) -> Interval:
        """The mean and its interval for all arms at once, NaN where they are unknown."""
        mean, half = (math.nan if x is None else x for x in (self.gap, self.half_width))
        return Interval(mean, mean - half, mean + half)

    @property
    def individual(self) -> Interval:
        """The mean and Student's interval of these gaps alone; NaN without any."""
        return interval(list(self.gaps.values())) if self.gaps else Interval(*[math.nan] * 3)

    @property
    def is_proven(self) -> bool:
        """Whether the rule calls the arm different from the reference."""
        return not self.has_failed and self.judgement is not None and self.judgement.is_different

    @property
    def conclusion(self) -> str:
        """The readable conclusion: better, worse, equal, ...; "open" with one seed."""
        if self.diverged:
            return "diverges"
        if self.has_failed:
            return "failed"
        if self.is_reference:
            return "reference"
        return "nothing to compare" if self.judgement is None else self.judgement.word(self.undecided)

    @property
    def loss(self) -> float | None:
        """Mean last loss over the seeds; None if a failed run rules out a mean."""
        is_lucky = self.has_failed and len(self.runs) > 1
        return statistics.fmean(self.losses) if self.losses and not is_lucky else None

    @property
    def tokens_per_s(self) -> float | None:
        """Mean over the seeds."""
        return mean_of(self.runs.values(), "tokens_per_s")

    @property
    def memory_bytes(self) -> float | None:
        """Mean over the seeds."""
        return mean_of(self.runs.values(), "peak_memory_bytes")

    @property
    def arithmetic(self) -> str:
        """ "native", "emulated", or several."""
        return " and ".join(dict.fromkeys(run.backend for run in self.runs.values() if run.backend))


def mean_of(runs: Iterable[Run], figure: str) -> float | None:
    """Mean of a figure over the runs that have it; None if no run has it."""
    values = [v for run in runs if (v := getattr(run, figure)) is not None]
    return statistics.fmean(values) if values else None


def _variants(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Runs by variant and seed, in the order of their first runs; a repeated seed starts another variant."""
    by_variant: dict[str, dict[int, Run]] = {}
    for run in runs:
        config = {section: dict(table) for section, table in run.config.items() if isinstance(table, dict)}
        for key in ("seed", "threads"):  # runs that began alone do not pin threads, a comparison's runs do
            config.get("training", {}).pop(key, None)
        config.pop("log", None)  # affects only the display
        key = json.dumps(config, sort_keys=True, default=str) if config else run.name
        while key in by_variant and run.seed in by_variant[key]:
            key += _AGAIN
        by_variant.setdefault(key, {})[run.seed] = run
    return by_variant


class Gap(NamedTuple):
    """The excess of a loss over another, the tokens of the comparison, and whether both runs end there."""

    percent: float
    nats: float
    tokens: int
    is_final: bool


def gap_to(run: Run, first: Run, by_validation: bool) -> Gap | None:
    """The gap of `run` to `first` at the last equal number of tokens; None if no number is equal.

    It compares validation losses, or means of the last 10 train losses at equal tokens. All pairs of a
    comparison take the same kind.
    """
    losses, reference = (_by_tokens(one, by_validation) for one in (run, first))
    equal = [tokens for tokens in losses if tokens in reference][-1 if by_validation else -FINAL_STEPS :]
    base = sum(reference[tokens] for tokens in equal)
    if not base:
        return None
    excess = sum(losses[tokens] for tokens in equal) - base
    is_final = equal[-1] == max(losses) == max(reference)
    return Gap(100 * excess / base, excess / len(equal), equal[-1], is_final)


def _by_tokens(run: Run, by_validation: bool) -> dict[int, float]:
    """The losses by tokens, without the validation before training, which all runs share."""
    if by_validation:
        return {at.tokens: at.val_loss for at in run.validation if at.tokens > 0}
    return {at.tokens: at.loss for at in run.steps}


def sampling_error(found: Sequence[Verdict]) -> float | None:
    """The error of gaps from their held-out tokens in percent; None without pairs on the same tokens.

    It is the root mean square over all pairs.
    """
    errors = []
    for one in found:
        for seed in one.runs.keys() & one.partners.keys():
            mine, base = one.runs[seed].final_validation, one.partners[seed].final_validation
            if mine is None or base is None or (mine.tokens, mine.held_out) != (base.tokens, base.held_out):
                continue
            if len(mine.parts) == len(base.parts) >= LEAST_PARTS:
                errors.append(error_percent(mine.parts, base.parts, base.val_loss))
    errors = [error for error in errors if math.isfinite(error)]
    return math.hypot(*errors) / math.sqrt(len(errors)) if errors else None


def error_percent(losses: Sequence[float], reference: Sequence[float], loss: float) -> float:
    """The sampling error of a gap in percent of the reference's `loss`, by the losses of both on four or
    more equal parts of the held-out tokens; NaN if one is not finite.
    """
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
    if not all(map(math.isfinite, differences)) or not loss:
        return math.nan
    return 100 * statistics.stdev(differences) / math.sqrt(len(differences)) / loss


class Row(NamedTuple):
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


COLUMNS = Row._fields


def rows_text(rows: Sequence[Row]) -> str:
    """The rows as the text of a CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        losses = ["" if math.isnan(x) else f"{x:.6f}" for x in (row.own_loss, row.bf16_loss)]
        writer.writerow([*row[:4], *losses, row.status])
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
    by_variant = _variants(runs)
    first, reference = next(iter(by_variant.items()))
    # The reference decides for all: a pair whose run has not been validated yet waits.
    by_validation = any(run.final_validation is not None for run in reference.values())
    found: list[Verdict] = []
    for key, members in by_variant.items():
        run = next(iter(members.values()))
        name = run.name.removesuffix(f"-seed-{run.seed}")
        repeats = key.startswith(first + _AGAIN) or (bool(found) and is_control(name, found[0].name))
        partners = reference if found else {}
        one = Verdict(name, members, partners, repeats, by_validation, is_reference=not found)
        pairs = {seed: gap for seed in members if (gap := one.pair(seed)) is not None}
        if any(len(of) > 1 and any(run.has_failed for run in of.values()) for of in (members, partners)):
            pairs = {}  # a run of several failed, and the others are lucky
        one = replace(
            one,
            gaps={seed: gap.percent if in_percent else gap.nats for seed, gap in pairs.items()},
            is_done=all(run.status == "done" for run in members.values())
            and all(reference[seed].status in ENDED for seed in pairs),
            tokens=max((gap.tokens for gap in pairs.values()), default=0),
        )
        found.append(one)
    family = [number for number, one in enumerate(found) if number and not one.is_control]
    known = known_of(runs)
    if not in_percent:
        known *= next(iter(found[0].losses), 0.0) / 100
    judged = judge({number: one.gaps for number, one in enumerate(found)}, family, known)
    return [replace(one, judgement=judged.get(number)) for number, one in enumerate(found)]


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
    """The verdicts on all arms but the reference ("": that of the first row), by rung and arm.

    The arms of the `family` share the 5 %; (): all except reference and controls. The `parameters` in linear
    layers give the length of runs, and with `is_quiet` what is known of it; 0: the rows alone judge. Arms
    whose interval includes zero are `undecided`.
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
        partners={},
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
        replace(top.pop(one.name), runs=one.runs, partners=one.partners, is_done=one.is_done)
        if one.name in top
        else replace(one, rung=last)
        for one in of_runs
    ]
    return [*here, *top.values(), *(one for one in of_rows if one.rung < last)]

"""Groups runs into variants, pairs each run with its reference, and takes the gap of each pair.

Runs that differ only in `training.seed`, or in the threads that they pin, are one variant; the first run's
variant is the reference. A seed determines a run's initial weights and the order of its tokens, so a run is
compared only with the reference's run of the same seed. Losses fall with every token, so they are compared at
the last number of tokens at which both runs were measured.

**Held-out tokens.** Two runs are validated on the same tokens, but what separates them differs from token to
token. With d_j the difference of their losses on part j of m equal parts, the sampling error of the gap is

    stdev(d_j) / sqrt(m) / reference loss

It is a share of the deviation between seeds. More seeds average it away as well, at the price of whole
trainings; more held-out tokens cost a forward pass each, and n times as many divide it by sqrt(n). In
ladder 2 (docs/evidence.md) the gaps of 8-bit arms deviate by 0.10 % on 65,536 tokens, of which 0.06 % is
this error, and by 0.06 % on 16 times as many.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.report.read.run import FINAL_STEPS, Run
from narrowgauge.trainer.report.verdict.rule import UNDECIDED, Judgement, is_control

_AGAIN = " again"


NAN = math.nan


@dataclass(frozen=True)
class Verdict:
    """One arm at one rung against the reference, in percent; the rows of another machine have no runs."""

    name: str  # the name of the variant: that of its runs, without their seeds
    runs: dict[int, Run]  # its runs by seed, in the given order
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
        mean, half = (NAN if x is None else x for x in (self.gap, self.half_width))
        return Interval(mean, mean - half, mean + half)

    @property
    def alone(self) -> Interval:
        """The mean and Student's interval of these gaps alone; NaN without any."""
        return interval(list(self.gaps.values())) if self.gaps else Interval(NAN, NAN, NAN)

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


def groups(runs: Sequence[Run]) -> list[Verdict]:
    """Group runs by variant, in the order of their first runs; a repeated seed starts another group."""
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
    first = next(iter(by_variant), "")
    # The reference decides for all: a pair whose run has not been validated yet waits.
    by_validation = any(run.final_validation is not None for run in by_variant.get(first, {}).values())
    found: list[Verdict] = []
    for key, members in by_variant.items():
        run = next(iter(members.values()))
        name = run.name.removesuffix(f"-seed-{run.seed}")
        repeats = key.startswith(first + _AGAIN) or (bool(found) and is_control(name, found[0].name))
        found.append(Verdict(name, members, repeats, by_validation))
    return found


def references(all_groups: Sequence[Verdict]) -> dict[int, Run]:
    """The run that each run is compared with, by `id` of the run.

    It is the first group's run with the same seed. Runs of the first group, and runs with seeds that it
    lacks, have no reference and are left out.
    """
    reference = all_groups[0].runs
    return {
        id(run): reference[seed]
        for group in all_groups[1:]
        for seed, run in group.runs.items()
        if seed in reference
    }


@dataclass(frozen=True)
class Gap:
    """The excess of a loss over another, the tokens of the comparison, and whether both runs end there."""

    percent: float
    nats: float
    tokens: int
    final: bool


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
    return Gap(
        100 * excess / base, excess / len(equal), equal[-1], final=equal[-1] == max(losses) == max(reference)
    )


def _by_tokens(run: Run, by_validation: bool) -> dict[int, float]:
    """The losses by tokens, without the validation before training, which all runs share."""
    if by_validation:
        return {at.tokens: at.val_loss for at in run.validation if at.tokens > 0}
    return {at.tokens: at.loss for at in run.steps}


LEAST_PARTS = 4


def sampling_error(runs: Sequence[Run]) -> float | None:
    """The error of gaps from their held-out tokens in percent; None without pairs on the same tokens.

    It is the root mean square over all pairs.
    """
    reference_of, errors = references(groups(runs)), []
    for run in runs:
        reference = reference_of.get(id(run))
        mine, base = run.final_validation, None if reference is None else reference.final_validation
        if mine is None or base is None or (mine.tokens, mine.held_out) != (base.tokens, base.held_out):
            continue
        if len(mine.parts) == len(base.parts) >= LEAST_PARTS:
            errors.append(error_percent(mine.parts, base.parts, base.val_loss))
    errors = [error for error in errors if math.isfinite(error)]
    return math.hypot(*errors) / math.sqrt(len(errors)) if errors else None


def error_percent(losses: Sequence[float], reference: Sequence[float], loss: float) -> float:
    """The sampling error of a gap in percent of `loss`; NaN if a loss is not finite.

    Args:
        losses: The losses of a run on four or more equal parts of its held-out tokens.
        reference: The reference's losses on the same parts.
        loss: The reference's loss on all parts.
    """
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
    if not all(map(math.isfinite, differences)) or not loss:
        return math.nan
    return 100 * statistics.stdev(differences) / math.sqrt(len(differences)) / loss

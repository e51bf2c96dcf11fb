"""Verdicts over several seeds: each variant compared with the reference, with a confidence interval.

A seed determines a run's initial weights and the order of its tokens, so two runs with the same seed share
most of their luck, and the gap is measured in pairs: gap_i = loss_i / reference_i - 1 at equal tokens for
each seed i. The verdict is on the mean of these gaps, by the one `rule`: the deviation of gaps is pooled over
the variants, and intervals hold for all variants at once.

One seed has a gap but no interval. The spread of the gap along one curve (a block bootstrap over its steps)
cannot replace it: two trajectories that have separated stay apart. With 8 seeds of a tiny model it measured
0.002 for the mean gap of the last 100 of 300 steps, while the seeds spread by 0.010 (mxfp8) and 0.017
(mxfp4).
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.report.read.run import ENDED, Run
from narrowgauge.trainer.report.read.steps import warmup_spikes
from narrowgauge.trainer.report.verdict.gap import Gap, gap_to
from narrowgauge.trainer.report.verdict.groups import Group, groups
from narrowgauge.trainer.report.verdict.rule import Judgement, judge, known_deviation


@dataclass(frozen=True)
class Verdict:
    """One variant against the reference. Gaps in percent, ratios to the reference; None if unknown."""

    name: str
    is_reference: bool
    is_control: bool  # a repeat of the reference, or a null arm, which measures the noise
    seeds: tuple[int, ...]  # all seeds of the variant
    paired: tuple[int, ...]  # the seeds that the reference also has, with losses at equal tokens
    loss: float | None  # mean validation loss over seeds, or train loss if there is no validation
    loss_deviation: float | None  # standard deviation over the seeds
    judgement: Judgement | None  # of the gaps of the paired seeds
    tokens_per_s: float | None
    speed: float | None
    memory_bytes: float | None
    memory: float | None
    arithmetic: str
    is_done: bool  # all runs are done, and the reference's have ended, so the verdict is final
    has_failed: bool  # a run has failed, which decides without statistics

    @property
    def gap(self) -> float | None:
        """Mean over the paired seeds."""
        return None if self.judgement is None else self.judgement.mean

    @property
    def half_width(self) -> float | None:
        """Half the interval of the gap, for all variants at once; None for one seed."""
        return None if self.judgement is None else self.judgement.half_width

    @property
    def is_proven(self) -> bool:
        """Whether the rule calls the variant different from the reference."""
        return not self.has_failed and self.judgement is not None and self.judgement.is_different

    @property
    def conclusion(self) -> str:
        """The readable conclusion: better, worse, equal, ...; "open" with one seed."""
        if self.has_failed:
            return "failed"
        if self.is_reference:
            return "reference"
        return "nothing to compare" if self.judgement is None else self.judgement.word()


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """One verdict for each variant, the reference first."""
    all_groups = groups(runs)
    gaps, found = judged(all_groups)
    by_validation = has_validation(runs)
    return [
        _verdict(group, all_groups[0], by_validation, found.get(number), gaps[number])
        for number, group in enumerate(all_groups)
    ]


def judged(
    all_groups: Sequence[Group], in_percent: bool = True
) -> tuple[list[dict[int, float]], dict[int, Judgement]]:
    """The gaps of each variant by seed, in percent or in nats, and the judgement of each that has any.

    The family that shares the 5 % consists of the variants without the reference and controls.
    """
    gaps = judged_gaps(all_groups, in_percent)
    family = [number for number, group in enumerate(all_groups) if number and not group.is_control]
    reference = list(all_groups[0].runs.values())
    known = known_of([run for group in all_groups for run in group.runs.values()])
    if not in_percent:
        known *= (final_loss(reference[0], has_validation(reference)) or 0.0) / 100
    return gaps, judge(dict(enumerate(gaps)), family, known)


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


def has_validation(runs: Sequence[Run]) -> bool:
    """Whether the runs are compared by validation loss instead of train loss.

    The reference decides for all: a pair whose run has not been validated yet waits.
    """
    return any(run.final_validation is not None for run in groups(runs)[0].runs.values())


def paired_gaps(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """The gaps in percent of each variant by seed."""
    all_groups = groups(runs)
    return {group.name: gaps for group, gaps in zip(all_groups, judged_gaps(all_groups), strict=True)}


def judged_gaps(all_groups: Sequence[Group], in_percent: bool = True) -> list[dict[int, float]]:
    """The gaps of each variant by seed; {} for the reference, and if a failed run rules out a mean."""
    reference = all_groups[0]
    found = []
    for group in all_groups:
        is_partial = any(_has_failed(one) and len(one.runs) > 1 for one in (group, reference))
        # If a run of a variant failed, the remaining seeds are the lucky ones.
        gaps = {} if group is reference or is_partial else gaps_of(group, reference)
        found.append({seed: gap.percent if in_percent else gap.nats for seed, gap in gaps.items()})
    return found


def gaps_of(group: Group, reference: Group) -> dict[int, Gap]:
    """The gap of each seed that both variants have, with losses at equal tokens."""
    by_validation = has_validation(list(reference.runs.values()))
    return {
        seed: gap
        for seed, run in group.runs.items()
        if seed in reference.runs and (gap := gap_to(run, reference.runs[seed], by_validation)) is not None
    }


def is_finite(group: Group, by_validation: bool) -> bool:
    """Whether all last losses of a variant are finite."""
    losses = (final_loss(run, by_validation) for run in group.runs.values())
    return all(loss is None or math.isfinite(loss) for loss in losses)


def final_loss(run: Run, by_validation: bool) -> float | None:
    """The last loss of the kind by which runs are compared."""
    return run.final_val_loss if by_validation else run.final_train_loss


def _verdict(
    group: Group,
    reference: Group,
    by_validation: bool,
    judgement: Judgement | None,
    paired: Collection[int],
) -> Verdict:
    has_failed = _has_failed(group)
    found = (final_loss(run, by_validation) for run in group.runs.values())
    losses = [loss for loss in found if loss is not None]
    if has_failed and len(group.runs) > 1:
        losses = []
    partners = [reference.runs[seed] for seed in paired]
    speed, memory = group.mean(_speed), group.mean(_memory)
    backends = dict.fromkeys(run.backend for run in group.runs.values() if run.backend)
    return Verdict(
        name=group.name,
        is_reference=group is reference,
        is_control=group.is_control,
        seeds=tuple(group.runs),
        paired=tuple(paired),
        loss=statistics.fmean(losses) if losses else None,
        loss_deviation=statistics.stdev(losses)
        if len(losses) > 1 and all(map(math.isfinite, losses))
        else None,
        judgement=judgement,
        tokens_per_s=speed,
        speed=_ratio(speed, reference.mean(_speed)),
        memory_bytes=memory,
        memory=_ratio(memory, reference.mean(_memory)),
        arithmetic=" and ".join(backends),
        is_done=all(run.status == "done" for run in group.runs.values())
        and all(run.status in ENDED for run in partners),
        has_failed=has_failed,
    )


def _has_failed(group: Group) -> bool:
    return any(run.has_failed for run in group.runs.values())


def _speed(run: Run) -> float | None:
    return run.tokens_per_s


def _memory(run: Run) -> float | None:
    return run.peak_memory_bytes


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None

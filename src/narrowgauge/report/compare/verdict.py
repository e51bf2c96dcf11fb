"""Verdicts over several seeds: each variant compared with the reference, with a confidence interval.

Runs that differ in nothing but `training.seed` are one variant; the first run's variant is the reference. A
seed decides the weights a run starts from and the order of its tokens, so two runs of one seed share most of
their luck, and the gap is measured in pairs: gap_i = loss_i / reference_i - 1 at equal tokens for each seed
i. The verdict is the mean of these gaps, and its interval is Student's (`t_interval`) over the seeds. This is
narrower than the difference of two means, which varies as much as the seeds do.

One seed has a gap and no interval. The spread of the gap along one curve (a block bootstrap over its steps)
is no substitute: two trajectories that have parted stay apart. With 8 seeds of a tiny model it measured
0.002 for the mean gap of the last 100 of 300 steps, and the seeds spread by 0.010 (mxfp8) and 0.017 (mxfp4).
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from narrowgauge.report.compare.table import NOTHING, format_loss, gap_to, print_rows
from narrowgauge.report.read.run import Run
from narrowgauge.t_interval import CONFIDENCE, half_width
from narrowgauge.units import human_bytes, human_count, signed, signed_percent


@dataclass(frozen=True)
class Group:
    """The runs of one variant by seed, in the order in which they were given."""

    name: str
    runs: dict[int, Run]

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        """Mean of a value over the runs that have it; None if no run has it."""
        values = [v for run in self.runs.values() if (v := value(run)) is not None]
        return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Verdict:
    """One variant against the reference. Gaps in percent, ratios to the reference; None if unknown."""

    name: str
    is_reference: bool
    seeds: tuple[int, ...]  # all seeds of the variant
    paired: tuple[int, ...]  # the seeds that the reference has, too, with losses at equal tokens
    loss: float | None  # mean over seeds of the validation loss; of the train loss if there is none
    loss_deviation: float | None  # standard deviation over the seeds
    gap: float | None  # mean over the paired seeds
    half_width: float | None  # half the confidence interval of `gap`; None for one seed
    tokens_per_s: float | None
    speed: float | None
    memory_bytes: float | None
    memory: float | None
    arithmetic: str
    is_done: bool  # all runs are done, so the verdict is final

    @property
    def conclusion(self) -> str:
        """The conclusion for people: better, worse, equal, ...; "open" with one seed."""
        if self.is_reference:
            return "reference"
        if self.gap is None:
            return "nothing to compare"
        if not math.isfinite(self.gap):
            return "not finite"
        if self.half_width is None:
            return "open"
        if self.gap == 0 == self.half_width:
            return "equal"
        if abs(self.gap) <= self.half_width:
            return "no difference seen"
        return "worse" if self.gap > 0 else "better"


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs by variant, in the order of their first runs; a repeated seed starts another group."""
    by_variant: dict[str, Group] = {}
    for run in runs:
        config = {section: dict(table) for section, table in run.config.items() if isinstance(table, dict)}
        seed = int(config.get("training", {}).pop("seed", 0))
        config.pop("log", None)  # decides only what is shown
        key = json.dumps(config, sort_keys=True, default=str) if config else run.name
        while key in by_variant and seed in by_variant[key].runs:
            key += " again"
        group = by_variant.setdefault(key, Group(run.name.removesuffix(f"-seed-{seed}"), {}))
        group.runs[seed] = run
    return list(by_variant.values())


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """One verdict for each variant, the reference first."""
    all_groups = groups(runs)
    return [_verdict(group, all_groups[0]) for group in all_groups]


def _verdict(group: Group, reference: Group) -> Verdict:
    gaps = {
        seed: gap.percent
        for seed, run in group.runs.items()
        if seed in reference.runs and (gap := gap_to(run, reference.runs[seed])) is not None
    }
    losses = [loss for run in group.runs.values() if (loss := _loss(run)) is not None]
    speed, memory = group.mean(_speed), group.mean(_memory)
    backends = dict.fromkeys(run.backend for run in group.runs.values() if run.backend)
    return Verdict(
        name=group.name,
        is_reference=group is reference,
        seeds=tuple(group.runs),
        paired=tuple(gaps),
        loss=statistics.fmean(losses) if losses else None,
        loss_deviation=statistics.stdev(losses)
        if len(losses) > 1 and all(map(math.isfinite, losses))
        else None,
        gap=statistics.fmean(gaps.values()) if gaps else None,
        half_width=half_width(list(gaps.values())),
        tokens_per_s=speed,
        speed=_ratio(speed, reference.mean(_speed)),
        memory_bytes=memory,
        memory=_ratio(memory, reference.mean(_memory)),
        arithmetic=" and ".join(backends),
        is_done=all(run.status == "done" for run in group.runs.values()),
    )


def _loss(run: Run) -> float | None:
    return run.final_train_loss if run.final_val_loss is None else run.final_val_loss


def _speed(run: Run) -> float | None:
    return run.tokens_per_s


def _memory(run: Run) -> float | None:
    return run.peak_memory_bytes


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def verdict_rows(all_verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """One row for each variant: keys are the column heads in order, values are ready to print."""
    return [_row(verdict) for verdict in all_verdicts]


def _row(v: Verdict) -> dict[str, str]:
    star = "*" if "emulated" in v.arithmetic else ""
    spread = "" if v.loss_deviation is None else f" ± {v.loss_deviation:.4f}"
    speed = NOTHING if v.tokens_per_s is None else f"{human_count(v.tokens_per_s)}{star}"
    memory = NOTHING if v.memory_bytes is None else human_bytes(v.memory_bytes)
    return {
        "variant": v.name,
        "seeds": str(len(v.seeds)),
        "loss": f"{format_loss(v.loss)}{spread}",
        "gap": _gap(v),
        "95 % interval": _interval(v),
        "verdict": v.conclusion + ("" if v.is_done else " (unfinished)"),
        "tokens/s": speed if v.speed is None or v.is_reference else f"{speed} ({v.speed:.2f}x)",
        "memory": memory if v.memory is None or v.is_reference else f"{memory} ({v.memory:.2f}x)",
        "arithmetic": v.arithmetic or NOTHING,
    }


def _gap(v: Verdict) -> str:
    if v.is_reference or v.gap is None:
        return NOTHING
    return signed_percent(v.gap)


def _interval(v: Verdict) -> str:
    if v.is_reference or v.gap is None or not math.isfinite(v.gap):
        return NOTHING
    if v.half_width is None:
        return "none"
    return f"{signed(v.gap - v.half_width)} .. {signed_percent(v.gap + v.half_width)}"


def verdict_notes(all_verdicts: Sequence[Verdict]) -> list[str]:
    """Notes that a reader of the verdicts needs, one sentence each."""
    reference, others = all_verdicts[0], all_verdicts[1:]
    notes = []
    if any(v.gap is not None and v.half_width is None for v in others):
        notes.append(
            "A gap of one seed has no confidence interval: another seed would give another gap. "
            "--seeds 3 or more goes on from these runs."
        )
    if any(v.half_width is not None for v in others):
        notes.append(
            f"Gap: mean over the seeds, each against {reference.name}'s loss of the same seed; interval: "
            f"{CONFIDENCE:.0%} of Student's t over the seeds; ±: standard deviation of the seeds."
        )
        if len(others) > 2:
            notes.append(f"An interval misses the true gap in 1 case of 20; of {len(others)}, one may well.")
    for v in others:
        if unpaired := sorted(set(v.seeds) - set(v.paired)):
            listed = ", ".join(map(str, unpaired))
            notes.append(f"{v.name}: seed {listed} has no equal tokens in {reference.name}, and is left out.")
    return notes


def print_verdicts(runs: Sequence[Run], console: Console) -> None:
    """Print the verdicts as a table with notes beneath; prints nothing for a single run."""
    if len(runs) < 2:
        return
    all_verdicts = verdicts(runs)
    print_rows(verdict_rows(all_verdicts), verdict_notes(all_verdicts), console, numbers_from=1)

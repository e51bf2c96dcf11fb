"""The steps and validations in the records of a run.

A missing or non-finite value becomes NaN, never zero: a loss that overflowed must stay visible in every mean
that includes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from narrowgauge.guard.warmup import spike_ratio
from narrowgauge.trainer.report.read.records import as_float

FIGURES = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "memory_bytes", "step_ms")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. Unrecorded floats are NaN."""

    step: int
    tokens: int  # cumulative
    seconds: float  # cumulative time spent in steps, without pauses between restarts
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float
    memory_bytes: float
    step_ms: float = math.nan


class Validation(NamedTuple):
    """One pass over the held-out tokens after `tokens` of training.

    Attributes:
        held_out: The number of held-out tokens; 0 if unrecorded.
        parts: The losses of equal parts of them; () if unrecorded.
    """

    step: int
    tokens: int
    val_loss: float
    held_out: int = 0
    parts: tuple[float, ...] = ()


def training_steps(records: Mapping[int, Mapping[str, Any]]) -> list[Step]:
    """The training steps. A line that covers several steps applies its `step_ms` to each of them."""
    steps: list[Step] = []
    seconds, previous = 0.0, 0
    for number, record in records.items():
        if "loss" not in record:
            continue
        figures = {name: as_float(record.get(name)) for name in FIGURES}
        milliseconds = figures["step_ms"]
        seconds += (number - previous) * milliseconds / 1000 if math.isfinite(milliseconds) else 0.0
        previous = number
        steps.append(Step(number, _tokens(record, steps), seconds, **figures))
    return steps


def finite(steps: Sequence[Step], name: str) -> list[float]:
    """The finite values of a figure."""
    return [value for step in steps if math.isfinite(value := getattr(step, name))]


def warmup_spikes(steps: Sequence[Step]) -> list[float]:
    """The spikes among the gradient norms of a run while its learning rate rises (`guard.warmup`).

    Returns:
        Each as a multiple of the median before it.
    """
    peak = max((step.lr for step in steps if math.isfinite(step.lr)), default=math.inf)
    norms: list[float] = []
    found = []
    for step in steps:
        if not math.isfinite(step.grad_norm) or not step.grad_norm:
            break
        found.append(spike_ratio(norms, step.grad_norm))
        norms.append(step.grad_norm)
        if step.lr >= peak:
            break
    return [ratio for ratio in found if ratio]


def validations(records: Mapping[int, Mapping[str, Any]], steps: Sequence[Step]) -> list[Validation]:
    """The validation losses; a record without tokens takes the preceding step's."""
    found: list[Validation] = []
    passed = 0
    for number, record in records.items():
        while passed < len(steps) and steps[passed].step <= number:
            passed += 1
        if "val_loss" in record:
            before = steps[max(passed - 1, 0) : passed]
            found.append(
                Validation(
                    number,
                    _tokens(record, before),
                    as_float(record["val_loss"]),
                    _whole(record.get("val_tokens")),
                    tuple(map(as_float, parts)) if isinstance(parts := record.get("val_parts"), list) else (),
                )
            )
    return found


def _tokens(record: Mapping[str, Any], before: Sequence[Step]) -> int:
    return _whole(record.get("tokens"), before[-1].tokens if before else 0)


def _whole(value: object, otherwise: int = 0) -> int:
    number = as_float(value)
    return int(number) if math.isfinite(number) else otherwise

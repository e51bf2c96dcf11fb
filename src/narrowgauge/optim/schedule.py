"""The learning rate as a pure function of the step, without torch.

warm-up    lr * step / warmup_steps                              steps 1 .. warmup_steps
cosine     half a cosine from lr to final, over the rest
linear     a straight line from lr to final, over the rest
wsd        lr until the last `decay_fraction` of all steps, then a line to final (arXiv 2404.06395)
constant   lr
"""

import math
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]


def learning_rate(
    step: int,
    *,
    lr: float,
    steps: int,
    kind: ScheduleKind,
    warmup_steps: int,
    final_lr_fraction: float,
    decay_fraction: float,
) -> float:
    """The learning rate of optimizer step `step` (1 .. steps).

    Args:
        step: The step about to be taken; the first is 1.
        lr: The peak.
        steps: The number of steps of the run.
        kind: One of `ScheduleKind`.
        warmup_steps: The length of the linear rise, in steps.
        final_lr_fraction: The final rate as a share of the peak.
        decay_fraction: For "wsd", the share of all steps over which the rate falls.
    """
    if step <= warmup_steps:
        return lr * (step / warmup_steps)  # in this order, the last step of warm-up gets exactly lr
    start = decay_start(steps=steps, kind=kind, warmup_steps=warmup_steps, decay_fraction=decay_fraction)
    if start is None or step < start:
        return lr
    progress = min((step - start + 1) / max(steps - start + 1, 1), 1.0)
    fall = (1 - math.cos(math.pi * progress)) / 2 if kind == "cosine" else progress
    return lr * (1 - fall * (1 - final_lr_fraction))


def decay_start(*, steps: int, kind: ScheduleKind, warmup_steps: int, decay_fraction: float) -> int | None:
    """The first step at which the learning rate falls, None for "constant"; see `learning_rate`."""
    if kind == "constant":
        return None
    return 1 + (warmup_steps if kind != "wsd" else max(warmup_steps, steps - round(steps * decay_fraction)))

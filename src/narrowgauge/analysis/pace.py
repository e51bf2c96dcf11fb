"""The loss that more training removes, which converts lost progress of steps to loss.

A run whose steps lose the share s of their progress is, after n steps, where it would be after n (1 - s). If
the loss falls by `pace` nats while the steps grow by a factor of e, that costs

    s * pace,    pace = - d loss / d log(step)

nats: the cost of the lost progress after the steps that the run has taken. The pace is the least-squares
slope of the training loss over the last doubling of the steps.
"""

import math
from collections.abc import Mapping


def pace(losses: Mapping[int, float]) -> float | None:
    """The nats that a run removes from its loss while its steps grow by a factor of e.

    Args:
        losses: The training loss by step, from 1.

    Returns:
        At least 0: lost progress costs nothing once the loss no longer falls. None for fewer than two steps.

    >>> losses = {step: 5 - 0.7 * math.log(step) for step in range(1, 101)}
    >>> round(pace(losses), 6)
    0.7
    """
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    last = max(finite, default=0)
    half = {step: loss for step, loss in finite.items() if 2 * step >= last}
    taken = half if len(half) > 1 else finite
    if len(taken) < 2:
        return None
    times = [math.log(step) for step in taken]
    middle, mean = math.fsum(times) / len(times), math.fsum(taken.values()) / len(taken)
    rise = math.fsum((t - middle) * (loss - mean) for t, loss in zip(times, taken.values(), strict=True))
    return max(0.0, -rise / math.fsum((t - middle) ** 2 for t in times))

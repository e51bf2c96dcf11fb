"""A spike of the gradient norm in the warm-up: from there on two runs of one seed are different runs.

A spike is a norm, after the fifth step, above three times the median of the twenty before it (measured at
seven widths: experiments/LOG.md, 2026-11-23). The window of the other spikes is not full
that early, and none of their reactions helps: the step is taken, and the run reports it once.

Why it matters: in ladder 1, whose warm-ups spike, pairs deviate by 0.5 to 0.9 % (docs/evidence.md); in the
pilot of ladder 2 (docs/evidence.md), pairs from the same weights deviate by 0.58 % with spikes and by 0.13 %
with weights that do not spike.
"""

import statistics
from collections.abc import Sequence

_FACTOR, _BEFORE, _LEAST = 3.0, 20, 5


def spike_ratio(before: Sequence[float], norm: float) -> float:
    """A gradient norm as a multiple of the median of the twenty `before` it; 0 if it is not a spike.

    >>> spike_ratio([1.0, 9.0, 1.0, 1.0, 1.0, 2.0], 4.0), spike_ratio([1.0, 1.0], 9.0)
    (4.0, 0.0)
    """
    if len(before) < _LEAST:
        return 0.0
    middle = statistics.median(before[-_BEFORE:])
    return norm / middle if norm > _FACTOR * middle > 0 else 0.0


def warmup_reason(before: Sequence[float], norm: float) -> str:
    """The reason why a step of the warm-up is a spike, and what follows; "" if it is not one."""
    ratio = spike_ratio(before, norm)
    if not ratio:
        return ""
    return (
        f"gradient norm {norm:.3g} in the warm-up is {ratio:.0f} times the median before it, so a comparison "
        "with this run begins in chaos; a longer warm-up, a lower optimizer.lr or model.initial_std = 0 "
        "avoids it"
    )

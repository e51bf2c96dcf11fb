"""The share of the best speed that a run is expected to reach, from a count or from measured runs.

The best leaves out costs that a count of work does not show: matmuls of small or odd shapes, kernels slower
than their bytes and instructions, the host, waiting for other processes, links under load. Measured speeds of
whole runs include all of them. Where a step can be counted for the device (`counted.py`), the expectation is
the count at speeds that whole steps of plain torch reached, printed with the measured runs.

Each machine's file lists such runs with their sources ([[measured]]), each with the speed that `plan` calls
the best for its settings. The quotient is the share.

Without a count, a plan takes the share of the nearest run. The distance is the difference in devices and in
parameters, in factors of two, plus one if the matmuls had another format. Among equally near runs it takes
the geometric mean, and reports the least and the most. Those runs are of other programs: the share shows what
is usual on the machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge.trainer.cluster.plan.cluster_spec import MeasuredRun
from narrowgauge.trainer.simulate import WholeCount


@dataclass(frozen=True)
class Expectation:
    """The expected share of the best speed."""

    share: float
    least: float  # of the nearest measured runs; the share itself if there is none
    most: float
    runs: tuple[MeasuredRun, ...]  # the nearest
    counted: WholeCount | None = None  # what the share comes from; None if from the runs


def expectation(
    measured: Sequence[MeasuredRun], devices: int, parameters: int, format: str
) -> Expectation | None:
    """The expected share for a plan; None if no run was measured.

    `format` is that of most of its matmuls.
    """
    if not measured:
        return None

    def distance(run: MeasuredRun) -> float:
        apart = abs(math.log2(run.devices / devices)) + abs(math.log2(run.parameters / parameters))
        return round(apart + (run.format != format), 6)

    least_apart = min(distance(run) for run in measured)
    nearest = tuple(run for run in measured if distance(run) == least_apart)
    shares = [min(1.0, run.share) for run in nearest]  # nothing is expected to exceed the best
    return Expectation(math.prod(shares) ** (1 / len(shares)), min(shares), max(shares), nearest)


def counted_expectation(
    counted: WholeCount | None, at_best: float, measured: Expectation | None, copies: float = 0.0
) -> Expectation | None:
    """The share by a count, along with the measured runs; these alone if there is no count.

    `at_best` are the seconds of the same step at best, by the same count; `copies` are seconds of copies
    between the host's memory and the device's, which a count leaves out.
    """
    if counted is None:
        return measured
    share = at_best / (counted.seconds + copies)
    if measured is None:
        return Expectation(share, share, share, (), counted)
    return replace(measured, share=share, counted=counted)

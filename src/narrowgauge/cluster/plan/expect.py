"""What a run is expected to reach of the best speed: a count of this program, or what measured runs reached.

The best leaves out what no count of work shows: products of small or odd shapes, kernels that are slower than
their bytes and instructions, the host, waiting for other processes, links under load. Their sum was measured
by others, as the speed of whole runs. Where a step can be counted for the device (`counted.py`), the count is
what is expected, at speeds that whole steps of plain torch reached. Measured runs then stand beside it.

Each machine's file holds such runs with their sources ([[measured]]), and beside each the speed that `plan`
calls the best for the same settings. The quotient is the share.

Elsewhere a plan takes the share of the run that is nearest to it. The distance is that of the numbers of
devices and of parameters, in factors of two, and one more if the products had another format. Where several
are equally near, it is their geometric mean, and their least and most are told. Those programs are not this
one, which nobody has measured on a GPU: the share says what is usual on the machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrowgauge.cluster.plan.cluster_spec import MeasuredRun
from narrowgauge.simulate import WholeCount


@dataclass(frozen=True)
class Expectation:
    """The share of the best speed that is expected.

    Attributes:
        share: the share.
        least: the least of the nearest measured runs; the share itself if there is none.
        most: the most of them.
        runs: these runs.
        counted: the count that the share comes from; None if it comes from the runs.
    """

    share: float
    least: float
    most: float
    runs: tuple[MeasuredRun, ...]
    counted: WholeCount | None = None


def expectation(
    measured: Sequence[MeasuredRun], devices: int, parameters: int, format: str
) -> Expectation | None:
    """The share that is expected of a plan; None if no run was measured.

    Args:
        measured: the runs of the cluster.
        devices: devices of the plan.
        parameters: parameters of its model.
        format: the format of most of its products.
    """
    if not measured:
        return None

    def distance(run: MeasuredRun) -> float:
        apart = abs(math.log2(run.devices / devices)) + abs(math.log2(run.parameters / parameters))
        return round(apart + (run.format != format), 6)

    least_apart = min(distance(run) for run in measured)
    nearest = tuple(run for run in measured if distance(run) == least_apart)
    shares = [min(1.0, run.share) for run in nearest]  # nothing is expected to be faster than the best
    return Expectation(math.prod(shares) ** (1 / len(shares)), min(shares), max(shares), nearest)


def counted_expectation(
    counted: WholeCount | None, at_best: float, measured: Expectation | None, copies: float = 0.0
) -> Expectation | None:
    """The share that a count gives, beside the measured runs; these alone if nothing is counted.

    Args:
        counted: the count of a step.
        at_best: the seconds of the same step at best, by the same count.
        measured: what measured runs reached.
        copies: the seconds of copies between the host's memory and the device's, which no count has.
    """
    if counted is None:
        return measured
    share = at_best / (counted.seconds + copies)
    if measured is None:
        return Expectation(share, share, share, (), counted)
    return replace(measured, share=share, counted=counted)

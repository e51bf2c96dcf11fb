"""The bins of `histogram`; reports read them without torch."""

import math
from typing import NamedTuple

from narrowgauge.formats import Format

BINS = 64
UNDER, OVER = 6, 3  # octaves


class Bins(NamedTuple):
    """The bins of a format: the exponent of the first, and log2 of the bins per octave."""

    low: int
    fine: int


def bins_of(fmt: Format) -> Bins:
    """The bins that cover a format's range."""
    low = math.frexp(fmt.smallest_subnormal)[1] - 1 - UNDER
    high = math.frexp(fmt.max)[1] + OVER
    return Bins(low, max(k for k in (0, 1, 2) if (high - low) << k <= BINS or k == 0))

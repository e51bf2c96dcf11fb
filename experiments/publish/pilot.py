"""The pilot of ladder 2: how much each design of an experiment deviates from itself, and what it sees.

Three arms of a design have noise of 8 bits and nothing else: MXFP8, and unbiased dither of its size twice.
The losses of their weights under a bf16 forward pass have one mean for each seed and one variance s^2 in all,

    s^2 = sum of squares within seeds / (2 seeds)        2 degrees of freedom for each seed

and two of them differ by sqrt(2) s. That is the deviation of a pair, in percent of the loss. Its interval
follows from chi-squared. The signal is what MXFP4 loses beyond those arms, own forward pass.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.system.toml_text import toml_value
from narrowgauge.trainer.report.verdict.verdict import Row, gap_percent

EIGHT_BITS = ("dither-1", "dither-2", "mxfp8")
FOUR_BITS, REFERENCE = "mxfp4", "bf16"
LEAST_SEEDS, LEAST_SIGNAL = 3, 3.0


@dataclass(frozen=True, slots=True)
class Design:
    """What the pilot measured of one design, with the seeds that have all five arms.

    Attributes:
        loss: Mean loss of bf16 in nats.
        deviation: Of a pair under noise of 8 bits, in percent.
        low, high: Its 95 % interval.
        eight, four: Mean gap of the 8-bit arms and of MXFP4 to bf16, in percent, own forward pass.
    """

    name: str
    seeds: int
    loss: float
    deviation: float
    low: float
    high: float
    eight: float
    four: float

    @property
    def signal(self) -> float:
        """The signal in deviations of a pair."""
        return (self.four - self.eight) / self.deviation


def measure(name: str, rows: Sequence[Row]) -> Design | None:
    """The figures of a design; None while no seed has all arms."""
    by_key = {(row.arm, row.seed): row for row in rows if math.isfinite(row.own_loss)}
    arms = (REFERENCE, *EIGHT_BITS, FOUR_BITS)
    seeds = [s for s in sorted({row.seed for row in rows}) if all((arm, s) in by_key for arm in arms)]
    if not seeds:
        return None
    squares, eight, four = 0.0, [], []
    for seed in seeds:
        base = by_key[REFERENCE, seed]
        ends = [gap_percent(by_key[arm, seed].bf16_loss, base.bf16_loss) for arm in EIGHT_BITS]
        squares += statistics.variance(ends) * (len(ends) - 1)
        eight += [gap_percent(by_key[arm, seed].own_loss, base.own_loss) for arm in EIGHT_BITS]
        four.append(gap_percent(by_key[FOUR_BITS, seed].own_loss, base.own_loss))
    degrees = (len(EIGHT_BITS) - 1) * len(seeds)
    deviation = math.sqrt(2 * squares / degrees)
    low, high = deviation_interval(deviation, degrees)
    loss = statistics.fmean(by_key[REFERENCE, seed].own_loss for seed in seeds)
    return Design(
        name, len(seeds), loss, deviation, low, high, statistics.fmean(eight), statistics.fmean(four)
    )


def quiet_warmup_toml(one: Design, tokens_per_parameter: float) -> str:
    """What `compare` expects of runs whose warm-up does not spike (`report.verdict.rule.QuietWarmup`)."""
    values = {
        "design": one.name,
        "seeds": one.seeds,
        "tokens_per_parameter": round(tokens_per_parameter, 2),
        "deviation": round(one.deviation, 3),
        "low": round(one.low, 3),
        "high": round(one.high, 3),
    }
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    return "\n".join(
        [f"# Made by `make ladder2` from docs/evidence/ladder2/pilot/{one.name}.csv", *lines, ""]
    )


def choose(designs: Mapping[str, Design]) -> Design | None:
    """The design of ladder 2: the least deviation of those that see MXFP4 at three deviations or more.

    None while a design that could be chosen has fewer than three seeds.
    """
    if not designs or any(one.seeds < LEAST_SEEDS for one in designs.values()):
        return None
    seen = [one for one in designs.values() if one.signal >= LEAST_SIGNAL]
    return min(seen, key=lambda one: one.deviation, default=None)


def deviation_interval(deviation: float, degrees: int) -> tuple[float, float]:
    """The 95 % interval of a standard deviation of normal values, by chi-squared."""
    low, high = (deviation * math.sqrt(degrees / chi_squared(degrees, p)) for p in (0.975, 0.025))
    return low, high


def chi_squared(degrees: int, probability: float) -> float:
    """The quantile of chi-squared.

    >>> round(chi_squared(2, 0.975), 3), round(chi_squared(10, 0.025), 3)
    (7.378, 3.247)
    """
    low, high = 0.0, 10.0 * degrees + 50
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_below(degrees / 2, middle / 2) < probability else (low, middle)
    return high


def _share_below(a: float, x: float) -> float:
    """The regularized lower incomplete gamma function, by its series."""
    if x <= 0:
        return 0.0
    term = total = 1 / a
    n = a
    while term > total * 1e-15:
        n += 1
        term *= x / n
        total += term
    return total * math.exp(a * math.log(x) - x - math.lgamma(a))

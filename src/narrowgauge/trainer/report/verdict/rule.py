"""The rule of every verdict: in tables, on pages, of the gate and of the plan.

The gap of an arm to the reference is taken for each seed, in percent. Arms of a seed share its luck, so seeds
and arms form a two-way table in which the reference is a column of zeros:

    gap_ia = arm_a + seed_i + error_ia        i = 1 .. n, a = 0 .. k, gap_i0 = 0

The errors have one variance: repeating a training with sums in another order moves its end as far as another
format does (docs/evidence.md). So the variance is pooled, with (n - 1) k degrees of freedom, and
s^2 = 2 x mean square is that of a gap. For a single arm it is the variance of its gaps.

    interval    mean +- c s / sqrt(n), with Dunnett's c for the arms of the family (below)
    different   the interval excludes zero. Over all arms, 1 experiment in 20 does so wrongly
    equal       |mean| + t s / sqrt(n) < margin: two one-sided tests at 5 %, divided over the family

**Dunnett's c** (1955). Let k arms and a reference have n seeds each, and normal errors with one variance,
estimated with d degrees of freedom. The statistics T_a = (z_a - z_0) / (sqrt(2) u) share the reference z_0
and the estimate u = sqrt(chi2_d / d), so

    P(all |T_a| <= c) = E_u E_z [Phi(z + sqrt(2) c u) - Phi(z - sqrt(2) c u)]^k

and the critical value c is the one for which this is 95 %. For k = 1 it is Student's quantile. Both
expectations are sums over Gauss nodes.

**Few seeds.** Two differences that are nearly equal by luck have a tiny variance. The known deviation of
runs of that length (`known_deviation`) is therefore averaged in as one more degree of freedom; designs
differ tenfold, so it is worth no more. It can only raise s, and c stays that of d degrees, so the 5 %
holds whatever the true variance is.

**The family** is fixed by the plan: all arms except the reference and the controls (`is_control`).
Controls contribute to the variance, and each is judged separately.

**Outliers.** An arm whose gaps deviate more than three times as much as all others, such as one about to
diverge, is excluded from the pool and judged by its gaps alone. With few seeds luck does that as well, so the
factor is at least Student's quantile at 1 % over the number of arms: what the ratio of two deviations exceeds
by luck with one degree of freedom, and less with more.
"""

import math
import statistics
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from narrowgauge.system.files import shipped_text
from narrowgauge.system.t_interval import CONFIDENCE, t_quantile

FloatArray = NDArray[np.float64]
_SPREAD_NODES, _NORMAL_NODES = 64, 32


@cache
def spread_nodes(degrees: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights of u = sqrt(chi2 / degrees), the ratio of an estimated deviation to the true one.

    >>> nodes, weights = spread_nodes(4)
    >>> round(float(weights.sum()), 6), round(float((weights * nodes**2).sum()), 6)
    (1.0, 1.0)
    """
    reach = 8 / math.sqrt(2 * degrees)
    low, high = max(0.0, 1 - reach), 1 + reach
    x, w = np.polynomial.legendre.leggauss(_SPREAD_NODES)
    u = low + (high - low) * (x + 1) / 2
    d = degrees
    log_density = (
        math.log(2) + d / 2 * math.log(d / 2) - math.lgamma(d / 2) + (d - 1) * np.log(u) - d * u**2 / 2
    )
    return u, w * (high - low) / 2 * np.exp(log_density)


@cache
def critical_value(arms: int, degrees: int, confidence: float = CONFIDENCE) -> float:
    """The c that the largest of `arms` statistics exceeds in 1 - `confidence` of all experiments.

    >>> round(critical_value(1, 4), 3), round(critical_value(3, 10), 2)
    (2.776, 2.76)
    """
    if arms == 1:
        return t_quantile(degrees, confidence)
    return least(lambda c: _share_within(c, arms, degrees) >= confidence, 4.0)


def least(is_enough: Callable[[float], bool], high: float) -> float:
    """The least positive number that is enough, as all above it are, by bisection; `high` is a guess."""
    low = 0.0
    while not is_enough(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return (low + high) / 2


def _share_within(c: float, arms: int, degrees: int) -> float:
    """Probability that no statistic exceeds `c`."""
    u, weights = spread_nodes(degrees)
    z, of_z = np.polynomial.hermite_e.hermegauss(_NORMAL_NODES)
    reach = math.sqrt(2) * c * u[:, None]
    within = (ndtr(z + reach) - ndtr(z - reach)) ** arms
    return float(weights @ within @ of_z) / math.sqrt(2 * math.pi)


MARGIN = 0.25  # percent; the equality that reports of FP8 training claim (DeepSeek-V3, arXiv 2412.19437)
KNOWN_DEGREES = 1  # weight of the known deviation
UNDECIDED = "no difference seen"
_OWN_KIND = 3.0
_CHANCE_OF_OWN = 0.01  # that luck excludes an arm from the pool

#: Paired standard deviation of the gap in percent, by the most tokens per parameter for which it applies, of
#: runs whose warm-up spikes (`spike_ratio`).
KNOWN = (
    (0.5, 0.5, "experiments/LOG.md: 5 M parameters, 0.2 tokens each"),
    (3.0, 0.9, "docs/evidence.md, seven arms: 0.89 and 0.97 % at 0.85 M parameters, 1.0 and 1.9 tokens each"),
    (math.inf, 0.5, "docs/evidence.md, seven arms: 0.49 % there, 3.8 tokens each"),
)


@dataclass(frozen=True, slots=True)
class QuietWarmup:
    """The deviation of runs from scratch whose warm-up does not spike, from the pilot of docs/evidence.md."""

    design: str  # of the pilot
    seeds: int  # the number of seeds of its 8-bit arms
    tokens_per_parameter: float  # the length of its runs; nothing longer has been measured
    deviation: float  # of a pair, in percent
    low: float  # the ends of its 95 % interval
    high: float


@cache
def quiet_warmup() -> QuietWarmup:
    """What `make ladder2` wrote to `quiet_warmup.toml` from the rows of the pilot."""
    return QuietWarmup(**tomllib.loads(shipped_text("trainer/report/verdict", "quiet_warmup")))


Arm = TypeVar("Arm")
Gaps = Mapping[Arm, Mapping[int, float]]  # in percent, by arm and seed


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation of a gap, estimated with some degrees of freedom; `known` raises it."""

    measured: float
    degrees: int
    known: float = 0.0

    @property
    def deviation(self) -> float:
        """The deviation on which intervals are based.

        >>> round(Spread(0.0, 1, known=0.5).deviation, 3), Spread(0.5, 4, known=0.1).deviation
        (0.354, 0.5)
        """
        d = KNOWN_DEGREES
        mixed = (d * self.known**2 + self.degrees * self.measured**2) / (d + self.degrees)
        return math.sqrt(max(self.measured**2, mixed))

    @property
    def is_raised(self) -> bool:
        """Whether the known deviation makes the intervals wider than the measured one."""
        return self.deviation > self.measured


@dataclass(frozen=True, slots=True)
class Judgement:
    """One arm against the reference, by the rule."""

    seeds: int  # the number of gaps
    mean: float  # their mean in percent
    family: int  # the number of arms that share the 5 %
    spread: Spread | None  # the deviation of a gap; None if no arm has two seeds

    @property
    def half_width(self) -> float | None:
        """Half the interval of `mean`; None for one seed, 0 if all gaps are zero."""
        return self.half_width_of(self.seeds) if self.seeds > 1 and self.spread is not None else None

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the deviation; 0 if there is none."""
        return 0 if self.spread is None else self.spread.degrees

    def half_width_of(self, seeds: int) -> float:
        """Half the interval that `seeds` seeds with the same spread would have."""
        assert self.spread is not None
        degrees = round(self.degrees * (seeds - 1) / (self.seeds - 1))
        spread = replace(self.spread, degrees=degrees)
        return critical_value(self.family, degrees) * spread.deviation / math.sqrt(seeds)

    @property
    def is_different(self) -> bool:
        """Whether the interval excludes zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def is_within(self, margin: float = MARGIN) -> bool:
        """Whether two one-sided tests show that the gap is smaller than `margin` percent."""
        if self.seeds < 2 or self.spread is None:
            return False
        t = equality_factor(self.family, self.degrees)
        return abs(self.mean) + t * self.spread.deviation / math.sqrt(self.seeds) < margin

    def word(self, undecided: str = UNDECIDED) -> str:
        """The verdict: "worse", "better", "equal within 0.25 %", both, `undecided`, "open" (one seed), ..."""
        if not math.isfinite(self.mean):
            return "not finite"
        if self.half_width is None:
            return "open"
        if self.mean == 0 == self.half_width:
            return "equal"
        equal = f"within {MARGIN} %" if self.is_within() else ""
        if self.is_different:
            return ", ".join(filter(None, ["worse" if self.mean > 0 else "better", equal]))
        return f"equal {equal}" if equal else undecided


def equality_factor(family: int, degrees: int) -> float:
    """Student's one-sided quantile at 5 % divided by the number of arms."""
    return t_quantile(degrees, 1 - 2 * (1 - CONFIDENCE) / family)


def known_deviation(tokens_per_parameter: float, is_quiet: bool = False) -> float:
    """The paired standard deviation in percent of earlier runs of that length.

    `is_quiet`: whether no warm-up spikes.

    >>> known_deviation(0.2), known_deviation(12), known_deviation(12, is_quiet=True)
    (0.5, 0.5, 0.122)
    """
    if is_quiet:
        return quiet_warmup().deviation
    return next(deviation for limit, deviation, _ in KNOWN if tokens_per_parameter < limit)


def is_control(name: str, reference: str) -> bool:
    """Whether an arm checks the experiment itself: a repeat of the reference, a null arm, or one that breaks.

    >>> is_control("bf16-again", "bf16"), is_control("null-dither", "bf16"), is_control("fp8", "bf16")
    (True, True, False)
    """
    return name == f"{reference}-again" or name.startswith(("null", "broken"))


def judge(gaps: Gaps[Arm], family: Collection[Arm], known: float = 0.0) -> dict[Arm, Judgement]:
    """Judge all arms of an experiment together, by their gaps in percent.

    The plan compares the arms of the `family`, whether or not they have gaps yet; the others are controls.
    `known` is the known deviation of gaps of runs of that length; 0 if unknown.
    """
    spreads = _spreads(gaps, known)
    return {
        arm: Judgement(
            len(by_seed),
            statistics.fmean(by_seed.values()),
            len(family) if arm in family else 1,
            spreads.get(arm),
        )
        for arm, by_seed in gaps.items()
        if by_seed
    }


def _spreads(gaps: Gaps[Arm], known: float) -> dict[Arm, Spread]:
    """The spread by which each arm is judged: the pooled one, or that of the arm."""
    found: dict[Arm, Spread] = {}
    pool: dict[Arm, Mapping[int, float]] = {}
    for arm, by_seed in gaps.items():
        if by_seed and not any(by_seed.values()):
            if len(by_seed) > 1:  # the same computation: its zeros do not estimate the noise of others
                found[arm] = Spread(0.0, len(by_seed) - 1)
        elif all(map(math.isfinite, by_seed.values())):
            pool[arm] = by_seed
    while several := {arm: statistics.variance(list(g.values())) for arm, g in pool.items() if len(g) > 1}:
        widest = max(several, key=several.__getitem__)
        others = pooled_spread({arm: g for arm, g in pool.items() if arm != widest}, known)
        own = pooled_spread({widest: pool[widest]}, known)
        if own is None or others is None:
            break
        by_luck = t_quantile(others.degrees, 1 - _CHANCE_OF_OWN / len(gaps))
        if own.measured <= max(_OWN_KIND, by_luck) * others.deviation:
            break
        found[widest] = own
        del pool[widest]
    together = pooled_spread(pool, known)
    return found | ({} if together is None else dict.fromkeys(pool, together))


def pooled_spread(gaps: Gaps[Arm], known: float = 0.0) -> Spread | None:
    """The deviation of a gap, pooled over arms; None if there is no data to estimate it.

    >>> spread = pooled_spread({"fp8": {1: 1.0, 2: 2.0, 3: 1.5}})
    >>> round(spread.measured, 6), spread.degrees
    (0.5, 2)
    """
    arms = list(gaps)
    seeds = sorted({seed for by_seed in gaps.values() for seed in by_seed})
    cells: list[tuple[int, Arm | None, float]] = [(seed, None, 0.0) for seed in seeds]
    cells += [(seed, arm, gap) for arm, by_seed in gaps.items() for seed, gap in by_seed.items()]
    effects = len(seeds) + sum(map(bool, gaps.values()))
    if (degrees := len(cells) - effects) < 1:
        return None
    design = np.zeros((len(cells), len(seeds) + len(arms)))
    for row, (seed, arm, _) in enumerate(cells):
        design[row, seeds.index(seed)] = 1
        if arm is not None:
            design[row, len(seeds) + arms.index(arm)] = 1
    values = np.array([gap for _, _, gap in cells])
    residuals = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    return Spread(math.sqrt(2 * float(residuals @ residuals) / degrees), degrees, known)

"""Searches for the formats of the GEMMs of all linear layers that cost the least under a budget.

Each GEMM (fprop, dgrad, wgrad of each layer) gets one format for both operands; attention and the residual
stream stay in high precision. Its cost in nats is measured by training with it narrow (`forks`). Negative
costs count as zero, because a loss that falls by rounding is chance. Costs of different GEMMs are assumed to
add up. A GEMM of a layer with K inputs and N outputs takes 2 M N K FLOPs for M tokens, the same for all three
GEMMs. amount[f] is 1 for the formats of at most 4 bits and 0 for others.

Layers may be kept: all their GEMMs have the widest format, here and in the baselines. The command keeps the
head, as the shipped low-precision recipes do: a prediction from single steps was wrong about it
(docs/results.md).

    minimize    sum over i, f of cost[i, f] x[i, f]
    subject to  sum over f of x[i, f] = 1 for each GEMM i,    x in {0, 1}
                low <= sum over i, f of share[i] amount[f] x[i, f] <= high

This is a multiple-choice knapsack, and `scipy.optimize.milp` solves it exactly (HiGHS). SNIP (arXiv
2602.01410) has the same form; ModelOpt's `auto_quantize` relaxes it to a linear programme.

The baselines are those that a reviewer would ask for: `uniform` (the narrowest format for all that is not
kept), `keep-ends` (whole blocks stay in the widest, the head first, then the last and the first block
alternately), `smallest-error` (the GEMMs with the smallest relative quantization error of their operands are
narrow), and `random`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from statistics import fmean

import numpy as np

from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMMS, matches
from narrowgauge.system.errors import UserError
from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.analysis.budget import EPSILON, Budget

Gemm = tuple[str, str]  # layer, and "fprop", "dgrad" or "wgrad"
Assignment = Mapping[Gemm, str]  # the name of a cast
Gaps = Mapping[tuple[Gemm, str], Mapping[int, float]]  # in nats, by seed
BASELINES = ("uniform", "keep-ends", "smallest-error", "random")


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a search."""

    casts: Mapping[str, Cast]  # the formats by name; the last one is the widest
    shares: Mapping[Gemm, float]  # each GEMM's share of all FLOPs
    # the predicted cost of each GEMM in each format in nats, at least 0
    costs: Mapping[Gemm, Mapping[str, float]]
    kept: frozenset[Gemm]  # the GEMMs that stay in the widest format
    gaps: Gaps  # what forks measured for each GEMM and format by seed, in nats

    def amount(self, assignment: Assignment, budget: Budget) -> float:
        """The amount of a budget that an assignment uses."""
        return sum(self.shares[gemm] * budget.amounts[cast] for gemm, cast in assignment.items())

    def cost(self, assignment: Assignment) -> float:
        """The predicted cost of an assignment in nats."""
        return sum(self.costs[gemm][cast] for gemm, cast in assignment.items())

    def measured(self, assignment: Assignment) -> Interval:
        """The sum of the gaps of an assignment, negative ones as they are."""
        chosen = [self.gaps[gemm, cast] for gemm, cast in assignment.items()]
        return interval([math.fsum(gap[seed] for gap in chosen) for seed in chosen[0]])

    @property
    def narrowest(self) -> str:
        """The format with the fewest bits; the first of equals."""
        return min(self.casts, key=lambda name: self.casts[name].element.bits)

    @property
    def widest(self) -> str:
        """The format with the most bits; the last of equals."""
        return max(reversed(list(self.casts)), key=lambda name: self.casts[name].element.bits)


def choices_of(
    casts: Mapping[str, Cast], weights: Mapping[str, int], gaps: Gaps, keep: Sequence[str] = ()
) -> Choices:
    """The choices from what forks measured.

    Args:
        casts: The formats by name.
        weights: The number of elements of each layer's weight, in the order of the model.
        gaps: The gaps of each GEMM in each format in nats by seed; the cost is their mean, at least 0.
        keep: Patterns of the names of layers that stay in the widest format (`recipes.matches`).
    """
    total = 3 * sum(weights.values())
    gemms = [(layer, gemm) for layer in weights for gemm in GEMMS]
    return Choices(
        casts,
        {(layer, gemm): weights[layer] / total for layer, gemm in gemms},
        {gemm: {name: max(fmean(gaps[gemm, name].values()), 0.0) for name in casts} for gemm in gemms},
        frozenset(g for g in gemms if any(matches(g[0], pattern) for pattern in keep)),
        gaps,
    )


def solve(choices: Choices, budget: Budget) -> Assignment:
    """The assignment with the smallest predicted cost.

    Raises:
        UserError: No assignment lies within the budget.
    """
    costs = [choices.costs[gemm][name] for gemm in choices.shares for name in choices.casts]
    chosen = _milp(choices, costs, budget, budget.high)
    if chosen is None:
        amounts = [
            share * budget.amounts[name] for share in choices.shares.values() for name in choices.casts
        ]
        above = _milp(choices, amounts, budget, max(budget.amounts.values()))
        if above is None:
            most = _in_words(choices.amount(_uniform(choices), budget))
            raise UserError(
                f"{budget.option}: the most that can be reached is {most} {budget.words}; "
                "ask for less, or keep fewer layers (--keep)"
            )
        amount = choices.amount(dict(zip(choices.shares, above, strict=True)), budget)
        raise UserError(
            f"{budget.option}: no choice of whole GEMMs has {budget.low:.2f} to {budget.high:.2f} "
            f"{budget.words}; the next above has {_in_words(amount)}, so take that"
        )
    return dict(zip(choices.shares, chosen, strict=True))


def _in_words(amount: float) -> str:
    """An amount in three digits, rounded down, so that a budget of that value can be met."""
    return f"{floor(round(1000 * amount, 6)) / 1000:.3f}"


def _milp(choices: Choices, costs: Sequence[float], budget: Budget, high: float) -> list[str] | None:
    """The formats of the GEMMs with the smallest total cost and an amount in a range; None if impossible.

    `costs` has each GEMM's cost in each format, with the formats of a GEMM adjacent.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import

    count, names = len(choices.shares), list(choices.casts)
    allowed = [float(g not in choices.kept or n == choices.widest) for g in choices.shares for n in names]
    one_each = np.kron(np.eye(count), np.ones(len(names)))
    each = np.array([budget.amounts[name] for name in names])
    amounts = np.kron(np.array(list(choices.shares.values())), each)
    found = milp(
        np.array(costs) / (max(costs) or 1.0),  # the solver's tolerances are absolute
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(amounts, budget.low - EPSILON, high + EPSILON),
        ],
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, allowed),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return [names[i] for i in found.x.reshape(count, len(names)).argmax(1)]


def baselines(
    choices: Choices,
    budget: Budget,
    errors: Mapping[Gemm, float],
    blocks: Mapping[str, int | None],
    seed: int,
) -> dict[str, Assignment]:
    """The assignments that a search is compared with, by name; all except `uniform` keep to the budget.

    Args:
        choices: The GEMMs, their formats and costs.
        budget: The budget of the search.
        errors: The relative quantization error of each GEMM's operands in the narrowest format.
        blocks: The index of each layer's block; None for a layer outside the blocks.
        seed: The seed of `random`.
    """
    gemms = [gemm for gemm in choices.shares if gemm not in choices.kept]
    last = max((b for b in blocks.values() if b is not None), default=0)

    def from_the_middle(gemm: Gemm) -> float:
        block = blocks[gemm[0]]
        return last + 1.0 if block is None else min(block + 0.5, last - block)

    shuffled = random.Random(seed).sample(gemms, len(gemms))
    orders = {
        "keep-ends": sorted(gemms, key=lambda g: (blocks[g[0]] is None, -from_the_middle(g))),
        "smallest-error": sorted(gemms, key=lambda g: errors[g]),
        "random": shuffled,
    }
    uniform: dict[str, Assignment] = {"uniform": _uniform(choices)}
    return uniform | {name: _narrowed(choices, order, budget) for name, order in orders.items()}


def _uniform(choices: Choices) -> Assignment:
    """The narrowest format for all GEMMs that are not kept."""
    return {g: choices.widest if g in choices.kept else choices.narrowest for g in choices.shares}


def _narrowed(choices: Choices, order: Sequence[Gemm], budget: Budget) -> Assignment:
    """The narrowest format for the first GEMMs of an order that meet the budget, the widest for the rest."""
    assignment = dict.fromkeys(choices.shares, choices.widest)
    step = budget.amounts[choices.narrowest] - budget.amounts[choices.widest]
    amount = budget.amounts[choices.widest]
    for gemm in order:
        if budget.holds(amount):
            break
        after = amount + choices.shares[gemm] * step
        if after <= budget.high + EPSILON:
            assignment[gemm] = choices.narrowest
            amount = after
    return assignment

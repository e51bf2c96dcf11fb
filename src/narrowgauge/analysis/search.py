"""Which formats cost the least under a budget? A search over the GEMMs of all linear layers.

Each GEMM (fprop, dgrad, wgrad of each layer) gets one format for both of its operands; attention and the
residual stream stay wide. Its predicted cost is
the sum of the costs of the two places (`sensitivity.estimate_costs`); costs below zero count as zero, because
a loss that falls by rounding is chance. Costs of different places are taken to add up. The budget is a share
of FLOPs: a GEMM of a layer with K inputs and N outputs does 2 M N K of them for M tokens, all three GEMMs
alike, and those whose format has at most 4 bits must do at least that share, and at most 0.05 more.

    minimize    sum over i, f of cost[i, f] x[i, f]
    subject to  sum over f of x[i, f] = 1 for each GEMM i,    x in {0, 1}
                budget <= sum over i, f with 4 bits of share[i] x[i, f] <= budget + 0.05

This is a multiple-choice knapsack, and `scipy.optimize.milp` solves it exactly (HiGHS). SNIP (arXiv
2602.01410) has the same form; ModelOpt's `auto_quantize` relaxes it to a linear programme.

The baselines are what a reviewer asks for: `uniform` (the narrowest format everywhere), `keep-ends` (whole
blocks stay wide, the head first, then the last and the first block by turns), `smallest-error` (the GEMMs
with the smallest relative quantization error of their operands are narrow), and `random`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from narrowgauge.analysis.sensitivity import Cost
from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS

NARROW_BITS = 4
TOLERANCE = 0.05
Gemm = tuple[str, str]  # layer, and "fprop", "dgrad" or "wgrad"
Assignment = Mapping[Gemm, str]  # the name of a cast


@dataclass(frozen=True, slots=True)
class Choices:
    """What a search chooses from.

    Attributes:
        casts: The formats by name; the last one is the widest.
        shares: The share of all FLOPs that each GEMM does.
        costs: The predicted cost of each GEMM in each format, at least 0.
    """

    casts: Mapping[str, Cast]
    shares: Mapping[Gemm, float]
    costs: Mapping[Gemm, Mapping[str, float]]

    def is_narrow(self, cast: str) -> bool:
        """Whether a format counts for the budget."""
        return self.casts[cast].element.bits <= NARROW_BITS

    def share(self, assignment: Assignment) -> float:
        """The share of FLOPs in formats of at most 4 bits."""
        return sum(self.shares[gemm] for gemm, cast in assignment.items() if self.is_narrow(cast))

    def cost(self, assignment: Assignment) -> float:
        """The predicted cost of an assignment."""
        return sum(self.costs[gemm][cast] for gemm, cast in assignment.items())

    @property
    def narrowest(self) -> str:
        """The format with the fewest bits; the first of several."""
        return min(self.casts, key=lambda name: self.casts[name].element.bits)

    @property
    def widest(self) -> str:
        """The format with the most bits; the last of several."""
        return max(reversed(list(self.casts)), key=lambda name: self.casts[name].element.bits)


def require_choice(casts: Mapping[str, Cast], budget: float) -> None:
    """Check what was asked for, before anything is measured.

    Raises:
        UserError: No format has at most 4 bits, the budget is no share, or scipy is not installed.
    """
    if all(cast.element.bits > NARROW_BITS for cast in casts.values()):
        raise UserError(
            f"--formats {','.join(casts)}: none has {NARROW_BITS} bits or fewer, and the budget is a share "
            "of FLOPs in such formats; add one, such as mxfp4"
        )
    if not 0 <= budget <= 1:
        raise UserError(f"--budget {budget} must be a share from 0 to 1, such as 0.75")
    if find_spec("scipy") is None:
        raise UserError("search needs scipy, which is not installed; pip install scipy")


def choices_of(
    casts: Mapping[str, Cast], weights: Mapping[str, int], costs: Mapping[str, Sequence[Cost]]
) -> Choices:
    """The choices from the costs of places.

    Args:
        casts: The formats by name.
        weights: The number of elements of each layer's weight, in the order of the model.
        costs: The cost of each place by the name of the format, from `estimate_costs`.
    """
    total = 3 * sum(weights.values())
    gemms = [(layer, gemm) for layer in weights for gemm in GEMMS]
    by_place = {name: {(c.layer, c.place): max(c.cost, 0.0) for c in found} for name, found in costs.items()}
    return Choices(
        casts,
        {(layer, gemm): weights[layer] / total for layer, gemm in gemms},
        {
            (layer, gemm): {
                name: sum(by_place[name][layer, place] for place in GEMM_PLACES if place.startswith(gemm))
                for name in casts
            }
            for layer, gemm in gemms
        },
    )


def solve(choices: Choices, budget: float) -> Assignment:
    """The assignment of least predicted cost.

    Args:
        choices: The GEMMs, their formats and costs.
        budget: The least share of FLOPs in formats of at most 4 bits, from 0 to 1.

    Raises:
        UserError: No assignment lies within the tolerance.
    """
    options = [(gemm, name) for gemm in choices.shares for name in choices.casts]
    costs = [choices.costs[gemm][name] for gemm, name in options]
    chosen = _milp(choices, costs, budget, budget + TOLERANCE)
    if chosen is None:
        shares = [choices.shares[gemm] * choices.is_narrow(name) for gemm, name in options]
        above = _milp(choices, shares, budget, 1.0)
        assert above is not None  # everything in the narrowest format
        reached = choices.share(dict(zip(choices.shares, above, strict=True)))
        raise UserError(
            f"--budget {budget}: no choice of whole GEMMs has a share of {budget:.2f} to "
            f"{budget + TOLERANCE:.2f} of the FLOPs; the next above has {reached:.3f}, so take that"
        )
    return dict(zip(choices.shares, chosen, strict=True))


def _milp(choices: Choices, costs: Sequence[float], low: float, high: float) -> list[str] | None:
    """The formats of the GEMMs with the least sum of costs and a share of FLOPs in a range; None if none has.

    `costs` are those of each GEMM in each format, formats of one GEMM beside each other.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # an extra (`require_choice`)

    count, names = len(choices.shares), list(choices.casts)
    one_each = np.kron(np.eye(count), np.ones(len(names)))
    narrow = np.array([choices.is_narrow(name) for name in names], dtype=float)
    shares = np.kron(np.array(list(choices.shares.values())), narrow)
    found = milp(
        np.array(costs) / (max(costs) or 1.0),  # the solver's tolerances are absolute
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(shares, low - 1e-9, min(high, 1.0) + 1e-9),
        ],
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return [names[i] for i in found.x.reshape(count, len(names)).argmax(1)]


def baselines(
    choices: Choices, budget: float, errors: Mapping[Gemm, float], blocks: Mapping[str, int | None], seed: int
) -> dict[str, Assignment]:
    """The assignments that a search is compared with, by name; all but `uniform` keep to the budget.

    Args:
        choices: The GEMMs, their formats and costs.
        budget: The share of the search.
        errors: The relative quantization error of each GEMM's operands in the narrowest format.
        blocks: The number of each layer's block; None for a layer outside of the blocks.
        seed: The seed of `random`.
    """
    gemms = list(choices.shares)
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
    uniform: dict[str, Assignment] = {"uniform": dict.fromkeys(gemms, choices.narrowest)}
    return uniform | {name: _narrowed(choices, order, budget) for name, order in orders.items()}


def _narrowed(choices: Choices, order: Sequence[Gemm], budget: float) -> Assignment:
    """The narrowest format for the first GEMMs of an order that fit the budget, the widest for others."""
    assignment = dict.fromkeys(choices.shares, choices.widest)
    share = 0.0
    for gemm in order:
        if share >= budget - 1e-9:
            break
        if share + choices.shares[gemm] <= budget + TOLERANCE + 1e-9:
            assignment[gemm] = choices.narrowest
            share += choices.shares[gemm]
    return assignment

"""The averaging test: whether the mean of many random gradients approaches the true gradient.

Let g_1, g_2, ... be gradients of one batch, computed with independent random bits, and g the gradient in
exact arithmetic. Each is g_i = g + b + n_i: a bias b common to all, and noise n_i of mean zero. The relative
squared error of the mean of N of them is

    e(N) = (|b|^2 + |n|^2 / N) / |g|^2

In bits, -log2(e(N)) / 2: without bias it grows by half a bit for each doubling of N; with only bias it is
constant. The slope of the bits over log2 N distinguishes them: 0.5 is unbiased, 0 is all bias. (The test of
Quartet II: IST-DASLab/Quartet-II at 8776a90, `notebooks/unbiasedness.ipynb`.)

All disjoint groups of 1, 2, 4, ... consecutive draws are used, so the estimate of e(1) has as many terms as
there are draws. Their sums are kept like the digits of a binary counter: only log2(draws) gradients in
memory.
"""

import math
from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


def squared_norm(tensors: Tensors) -> float:
    """The sum of squares of all elements, added in float64."""
    return math.fsum(t.double().square().sum().item() for t in tensors.values())


def inner_product(a: Tensors, b: Tensors) -> float:
    """The inner product over all elements, accumulated in float64; both have the same names."""
    return math.fsum((t.double() * b[name].double()).sum().item() for name, t in a.items())


def difference(a: Tensors, b: Tensors) -> dict[str, torch.Tensor]:
    """a - b, by name."""
    return {name: t - b[name] for name, t in a.items()}


class GroupErrors:
    """The mean squared error of the means of 1, 2, 4, ... gradients, whose errors are added one by one."""

    def __init__(self) -> None:
        self._pending: list[dict[str, torch.Tensor] | None] = []  # the sum of 2^level errors, half a group
        self._squares: list[list[float]] = []  # |mean of the errors|^2 for each level's groups

    def add(self, error: Tensors) -> None:
        """Add the error of the next gradient."""
        total, level = dict(error), 0
        while True:
            if level == len(self._pending):
                self._pending.append(None)
                self._squares.append([])
            self._squares[level].append(squared_norm(total) / 4.0**level)
            half = self._pending[level]
            if half is None:
                self._pending[level] = total
                return
            self._pending[level] = None
            total, level = {name: half[name] + t for name, t in total.items()}, level + 1

    def squared_errors(self) -> list[float]:
        """The mean squared error of the mean of 1, 2, 4, ... gradients, up to the largest full group."""
        return [math.fsum(squares) / len(squares) for squares in self._squares]


def effective_bits(relative_squared_error: float) -> float:
    """-log2(e) / 2: halving the error adds one bit; infinite without error."""
    return math.inf if relative_squared_error == 0 else -math.log2(relative_squared_error) / 2


def slope(bits: list[float]) -> float:
    """The least-squares slope of bits over log2 of the group sizes 1, 2, 4, ...; NaN for fewer than two."""
    if len(bits) < 2:
        return math.nan
    middle, mean = (len(bits) - 1) / 2, math.fsum(bits) / len(bits)
    weights = [level - middle for level in range(len(bits))]
    above = math.fsum(w * (b - mean) for w, b in zip(weights, bits, strict=True))
    return above / math.fsum(w * w for w in weights)

"""Weights without a master whose rounding error goes into the first moment.

This is ECO (arXiv 2601.22101, algorithm 3). AdamW makes a wide weight w from a narrow one; it is stored as
Q(w), and e = w - Q(w) would be lost. A step of AdamW moves the weight by -(lr / c1) m / (sqrt(v / c2) + eps),
c = 1 - beta^t, and m decays by beta1 a step. So

    m += (c1 / lr) (1 - 1 / beta1) (sqrt(v / c2) + eps) e

with this step's m, v, t and lr gives the next step, whose m is beta1 times that, (1 - beta1) e to move the
weight by, and the steps after it the rest: (1 - beta1) (1 + beta1 + beta1^2 + ...) e = e in all. Nothing more
than AdamW's own state is kept.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowgauge.errors import UserError
from narrowgauge.optim.state_writer import Write
from narrowgauge.quantization import state_of

#: What is to be written once the weights are.
Feedback = Callable[[], list[Write]]


def fed_back(
    m: torch.Tensor, v: torch.Tensor, error: torch.Tensor, options: Mapping[str, Any], step: int
) -> torch.Tensor:
    """The first moment after it took in what a weight lost, float32.

    Every operation is rounded to float32: sqrt(v) / sqrt(c2) + eps, times the error, times the factor before
    them, which is computed in float64 and rounded once.

    Args:
        m: The first moment after the update, float32; it is changed.
        v: The second moment after the update, float32.
        error: The wide weight less the one that is stored, float32.
        options: AdamW's: lr, betas, eps. Under a learning rate of 0 nothing moves, and nothing is fed back.
        step: The number of the step, from 1.
    """
    (beta_1, beta_2), lr = options["betas"], options["lr"]
    if lr == 0 or beta_1 == 0:
        return m
    factor = (1 - beta_1**step) / lr * (1 - 1 / beta_1)
    root = v.sqrt().div_((1 - beta_2**step) ** 0.5).add_(options["eps"])
    return m.add_(root.mul_(error).mul_(factor))


def require_adamw(p: torch.Tensor, algorithm: str) -> None:
    """Refuse another algorithm for a weight whose rounding error goes into AdamW's first moment.

    Raises:
        UserError: The algorithm has another step.
    """
    weight = state_of(p).weight
    if weight is not None and weight.cast.state.feedback and algorithm != "adamw":
        raise UserError(
            f"recipe place 'weight': feedback = {weight.cast.state.feedback!r}, but {algorithm} moves this "
            'weight, and the feedback is for steps of AdamW; use optimizer.name = "adamw", or remove the key'
        )

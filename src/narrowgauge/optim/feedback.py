"""Weights without a master: their rounding error is added to the first moment.

This is ECO (arXiv 2601.22101, algorithm 3). AdamW computes the updated weight w in float32; it is stored as
Q(w), and e = w - Q(w) would be lost. A step of AdamW moves the weight by -(lr / c1) m / (sqrt(v / c2) + eps),
with c = 1 - beta^t, and m decays by beta1 per step. So

    m += (c1 / lr) (1 - 1 / beta1) (sqrt(v / c2) + eps) e

with the m, v, t and lr of this step lets the next step, whose m is beta1 times that, move the weight by
(1 - beta1) e, and later steps by the rest: (1 - beta1) (1 + beta1 + beta1^2 + ...) e = e in total. This needs
no state beyond AdamW's.
"""

from collections.abc import Mapping
from typing import Any

import torch

from narrowgauge.quantization import rounded_sqrt, state_of
from narrowgauge.system.errors import UserError


def fed_back(
    m: torch.Tensor, v: torch.Tensor, error: torch.Tensor, options: Mapping[str, Any], step: int
) -> torch.Tensor:
    """The first moment, changed in place, plus the feedback of `error`: the float32 weight minus the stored.

    `m` and `v` are float32, after the update. Every operation rounds to float32: sqrt(v) / sqrt(c2) + eps,
    times the error, times the leading factor, which is computed in float64 and rounded once. A learning
    rate of 0 disables the feedback.
    """
    (beta_1, beta_2), lr = options["betas"], options["lr"]
    if lr == 0 or beta_1 == 0:
        return m
    factor = (1 - beta_1**step) / lr * (1 - 1 / beta_1)
    root = rounded_sqrt(v).div_((1 - beta_2**step) ** 0.5).add_(options["eps"])
    return m.add_(root.mul_(error).mul_(factor))


def require_adamw(p: torch.Tensor, algorithm: str) -> None:
    """Require AdamW for a weight whose rounding error is fed back into the first moment."""
    weight = state_of(p).weight
    if weight is not None and weight.cast.feedback and algorithm != "adamw":
        raise UserError(
            f"recipe place 'weight': feedback = {weight.cast.feedback!r}, but {algorithm} updates this "
            'weight, and the feedback formula is for AdamW; use optimizer.name = "adamw", or remove the key'
        )

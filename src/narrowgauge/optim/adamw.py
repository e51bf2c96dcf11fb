"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) on state in any format.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = (1 - lr weight_decay) w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

The update is torch's, on float32 tensors. If a parameter's state is low-precision and kernels run, one kernel
computes the same digits (`kernels.adamw`).

**Feedback.** The rounding error of a weight without a master is added to the first moment. This is ECO (arXiv
2601.22101, algorithm 3). AdamW computes the updated weight w in float32; it is stored as Q(w), and
e = w - Q(w) would be lost. A step of AdamW moves the weight by -(lr / c1) m / (sqrt(v / c2) + eps), with
c = 1 - beta^t, and m decays by beta1 per step. So

    m += (c1 / lr) (1 - 1 / beta1) (sqrt(v / c2) + eps) e

with the m, v, t and lr of this step lets the next step, whose m is beta1 times that, move the weight by
(1 - beta1) e, and later steps by the rest: (1 - beta1) (1 + beta1 + beta1^2 + ...) e = e in total. This needs
no state beyond AdamW's.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch.optim.adamw import adamw

from narrowgauge.kernels import adamw as kernels
from narrowgauge.optim.optimizer import Algorithm, KeyOf, Optimizer, UpdateBatch
from narrowgauge.quantization import QuantizedState, local_tensor, rounded_sqrt, shard_of, state_of
from narrowgauge.recipes.recipe import RecipeLike


def adamw_update(batch: UpdateBatch, options: Mapping[str, Any]) -> None:
    """Torch's AdamW on float32 tensors, in place."""
    beta1, beta2 = options["betas"]
    arguments = {key: options[key] for key in ("lr", "weight_decay", "eps")}
    arguments |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
    m, v = batch.moments["m"], batch.moments["v"]
    adamw(batch.w, batch.g, m, v, [], batch.steps, fused=True, **arguments)


def adamw_fused(
    p: torch.Tensor, state: Mapping[str, Any], options: Mapping[str, Any], step: int, key_of: KeyOf
) -> bool:
    """AdamW by the kernel (`kernels.adamw`); returns False if it does not support the parameter's state."""
    kept = state_of(p)
    w = kept.master or kept.weight or local_tensor(p)
    g: torch.Tensor | QuantizedState | None = kept.gradient
    if kept.gradient is None or kept.gradient.wide is not None:
        g = None if p.grad is None else local_tensor(p.grad).contiguous()
    m, v, weight = state["m"], state["v"], kept.weight if kept.master else None
    if shard_of(p) is not None or not kernels.supports(w, g, m, v, weight):
        return False
    if weight is not None and weight.cast.is_scaled and isinstance(w, QuantizedState) and w.cast.is_random:
        return False  # the kernel rounds the amax of a master before its elements
    assert g is not None
    places = {"w": "master" if kept.master else "weight", "m": "m", "v": "v", "weight": "weight"}
    written = {"w": w, "m": m, "v": v, "weight": weight}
    random = [k for k, to in written.items() if isinstance(to, QuantizedState) and to.cast.is_random]
    keys = {name: key_of(places[name]) for name in random}
    kernels.adamw(w, g, m, v, weight, kernels.Factors.of(options, step), keys)
    state["step"].add_(1)
    return True


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


ADAMW = Algorithm(("m", "v"), adamw_update, adamw_fused, fed_back)


class AdamW(Optimizer):
    """AdamW with moments, masters and gradients in the formats of a recipe."""

    algorithms: ClassVar[Mapping[str, Algorithm]] = {"adamw": ADAMW}

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        recipe: RecipeLike = "fp32",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        seed: int = 0,
    ) -> None:
        """Allocate the state as zeros.

        Args:
            params: Tensors or groups of them.
            recipe: The recipe with the casts of the moments `m` and `v`.
            lr: The learning rate.
            betas: The decay rates of `m` and `v`.
            eps: Added to the square root of `v`.
            weight_decay: Each step subtracts `lr * weight_decay` times the weight.
            seed: The seed of stochastic rounding.
        """
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "algorithm": "adamw"}
        super().__init__(params, recipe, options, seed)

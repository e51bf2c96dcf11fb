"""Muon (Jordan et al., 2024): the step of a matrix is its momentum, orthogonalized.

    m = mu m + (1 - mu) g
    O = orthogonal((1 - mu) g + mu m)                     nearest to U V^T of the singular value decomposition
    w = (1 - lr weight_decay) w - lr 0.2 sqrt(max(rows, columns)) O

Five Newton-Schulz steps X <- a X + (b X X^T + c (X X^T)^2) X in bfloat16 bring all singular values close to
1. The factor 0.2 sqrt(max(...)) makes a step as large as AdamW's (arXiv 2502.16982), so both use one learning
rate. AdamW updates the embeddings, the head, norms and biases.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from narrowgauge.optim.adamw import ADAMW
from narrowgauge.optim.groups import members_of, tensor_of
from narrowgauge.optim.optimizer import Algorithm, Optimizer, UpdateBatch
from narrowgauge.recipes import RecipeLike

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
SMALLEST_NORM = 1e-7


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """A matrix with the singular vectors of `x` and singular values near 1, bfloat16."""
    X = x.bfloat16()
    X = X.T if x.shape[0] > x.shape[1] else X
    X = X / X.norm().clamp(min=SMALLEST_NORM)
    for _ in range(STEPS):
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=B, alpha=C), X, beta=A)
    return X.T if x.shape[0] > x.shape[1] else X


def muon_update(batch: UpdateBatch, options: Mapping[str, Any]) -> None:
    """Muon on float32 matrices, in place; the momentum of a sharded matrix is gathered first."""
    lr, mu, m = options["lr"], options["momentum"], batch.moments["m"]
    for w_NK, g_NK, m_NK, step, shard in zip(batch.w, batch.g, m, batch.steps, batch.shards, strict=True):
        step += 1
        m_NK.lerp_(g_NK, 1 - mu)
        momentum_NK = g_NK.lerp(m_NK, mu)
        shape = w_NK.shape if shard is None else shard.shape
        if shard is None:
            direction = orthogonal(momentum_NK)
        else:
            direction = shard.local_of(orthogonal(shard.full_tensor(momentum_NK)))
        w_NK.mul_(1 - lr * options["weight_decay"])
        w_NK.add_(direction, alpha=-lr * 0.2 * max(shape) ** 0.5)


MUON = Algorithm(("m",), muon_update)


class Muon(Optimizer):
    """Muon for matrices and AdamW for everything else, with state in the formats of a recipe."""

    algorithms: ClassVar[Mapping[str, Algorithm]] = {"muon": MUON, "adamw": ADAMW}

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        recipe: RecipeLike = "fp32",
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        seed: int = 0,
    ) -> None:
        """Allocate the state as zeros.

        Args:
            params: Tensors or groups of them. A group's `algorithm` is "muon" or "adamw"; in a group without
                one, Muon updates the matrices. Give embeddings and the head a group with
                `algorithm="adamw"`, as `parameter_groups` does.
            recipe: The recipe with the casts of the moments `m` and `v`.
            lr: The learning rate of both algorithms.
            momentum: Muon's mu.
            betas: AdamW's decay rates of `m` and `v`.
            eps: Added to the square root of AdamW's `v`.
            weight_decay: Each step subtracts `lr * weight_decay` times the weight.
            seed: The seed of stochastic rounding.
        """
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "algorithm": "adamw"}
        super().__init__(params, recipe, options, seed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one without an `algorithm` is split into its matrices and its other tensors."""
        if "algorithm" in param_group:
            super().add_param_group(param_group)
            return
        members = members_of(param_group)
        for algorithm, is_matrix in (("muon", True), ("adamw", False)):
            some = [p for p in members if (tensor_of(p).ndim == 2) == is_matrix]
            if some:
                super().add_param_group(param_group | {"params": some, "algorithm": algorithm})

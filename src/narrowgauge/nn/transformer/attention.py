"""Attention under a recipe: the module by which `convert` replaces a model's attention.

It has no parameters. While the recipe leaves all of its places in `compute`, it computes as the attention
that it replaces; otherwise `attention_function.py` computes it.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.nn.linear_function import autocast_disabled
from narrowgauge.nn.observer import Observer
from narrowgauge.nn.shards import EqualShare
from narrowgauge.nn.step_state import Stepped
from narrowgauge.nn.transformer.attention_function import AttentionContext, narrow_attention
from narrowgauge.quantization import Cast
from narrowgauge.recipes import ATTENTION_PRODUCTS, Recipe, is_wide
from narrowgauge.system.errors import UserError

# Above the tensor ids of linear layers and of the optimizer (`optim.optimizer`), below dropout's.
_FIRST_STREAM = 2**36
_STREAMS = 2 * len(ATTENTION_PRODUCTS)


class NarrowAttention(Stepped, Attention):
    """The attention of one layer, with its operands in the casts of a recipe.

    Attributes:
        casts: The cast of each place in this step; one that is missing, or None, is in `compute`.
        shard: The heads of this process.
        observer: Sees all operands; attached for a step.
    """

    def __init__(self, recipe: Recipe, index: int) -> None:
        """Compute under the recipe of this layer.

        Args:
            recipe: The recipe of this layer.
            index: The index of the attention in the model.
        """
        torch.nn.Module.__init__(self)
        self.recipe, self.index = recipe, index
        self.casts: Mapping[str, Cast | None] = dict(recipe.attention)
        self.shard = EqualShare()
        self.observer: Observer | None = None
        everything = [*recipe.attention.values(), *(c for r in recipe.rules for c in r.attention.values())]
        self.is_random = any(cast is not None and cast.is_random for cast in everything)
        # Plain CPU tensors that do not move with the module: each pass copies them.
        self.keys = self.first_sample = None
        self._set_keys(0, 0, 0)

    @property
    def is_wide(self) -> bool:
        """Whether every place is in `compute` in this step."""
        return all(is_wide(cast, self.recipe.compute) for cast in self.casts.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        q_BNTH: torch.Tensor,
        k_BKSH: torch.Tensor,
        v_BKSH: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout: Dropout | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> torch.Tensor:
        """Attention -> [B, N, T, H], as in `Attention`."""
        self._begin_pass()
        if self.is_wide:
            return super().forward(q_BNTH, k_BKSH, v_BKSH, mask, dropout, share)
        if dropout is not None:
            raise UserError(
                f"recipe {self.recipe.name!r} narrows attention, and probabilities with dropout have no "
                "place in a recipe; set model.attention_dropout = 0"
            )
        context = AttentionContext(self.casts, self.shard, observer=self.observer)
        if self.keys is not None and self.first_sample is not None:
            keys, first_sample = (t.to(q_BNTH.device) for t in (self.keys, self.first_sample))
            context = replace(context, keys=keys, first_sample=first_sample)
        with autocast_disabled(q_BNTH.device.type):
            return narrow_attention(q_BNTH, k_BKSH, v_BKSH, mask, context)

    def extra_repr(self) -> str:
        """The name of the recipe."""
        return f"recipe={self.recipe.name}"

    def _stream_ids(self) -> list[int]:
        return [_FIRST_STREAM + _STREAMS * self.index + i for i in range(_STREAMS)]

    def _use_rules(self, step: int, steps: int | None, decay: int | None) -> None:
        self.casts = dict(self.recipe.attention)
        for rule in self.recipe.rules:
            if rule.is_for_all and rule.holds(step, steps, decay):
                self.casts |= rule.attention

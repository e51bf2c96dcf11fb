"""One decoder-only transformer: GPT-2 and Llama are two configurations of it.

    tokens -> embedding (+ learned positions) -> blocks -> norm -> head -> logits

It knows nothing of number formats. For the rooms that do, every matmul with a weight is a `torch.nn.Linear`
under a fixed name, which may be replaced by any module that maps [B, T, in] to [B, T, out] and keeps `weight`
(and `bias`) as its parameters. Attention and the sums of the residual stream are modules without parameters
(`blocks.I.attention`, `blocks.I.attention_residual`, `blocks.I.mlp_residual`, `embedding_residual`), which
may also be replaced.

    embedding.weight  [V, D]      position_embedding.weight [max_sequence_length, D] (learned positions only)
    blocks.I.qkv  blocks.I.attention_out  blocks.I.gate_up (swiglu) or .up (gelu)  blocks.I.down
    blocks.I.experts.router  blocks.I.experts.J.gate_up (or .up)  blocks.I.experts.J.down    (experts only)
    blocks.I.attention_norm  blocks.I.mlp_norm  norm  head     (head.weight *is* embedding.weight when tied)
    blocks.I.q_norm.weight  blocks.I.k_norm.weight  [H]        (qk_norm only)

Legend: B sequences, T tokens, D dim, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.kernels.attention import document_mask
from narrowgauge.kernels.cross_entropy import cross_entropy
from narrowgauge.kernels.dispatch import contexts
from narrowgauge.kernels.head_loss import head_loss
from narrowgauge.kernels.residual import Residual, total
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import has_hooks
from narrowgauge.trainer.models.config import ModelConfig
from narrowgauge.trainer.models.experts import experts_of, with_balance
from narrowgauge.trainer.models.kv_cache import KVCache
from narrowgauge.trainer.models.layers import Block, Norm, make_dropout, rope_table
from narrowgauge.trainer.models.operators import Embedding

# A block, or a stand-in for one: (stream, its pending addend, rope, mask) to the first two.
BlockCall = Callable[..., tuple[Tensor, Tensor | None]]


class Transformer(nn.Module):
    """A decoder-only transformer with arbitrary weights; `initialize` sets its initial weights.

    `compute_dtype` is the dtype that the norms emit, hence the input dtype of the linear layers, the
    attention and the head. The norms and the loss are always fp32, and so is the residual stream unless its
    modules (`kernels.residual.Residual`) are replaced. A plain `nn.Linear` needs its input in the dtype of
    its weight, so a `compute_dtype` other than fp32 needs linears that cast (room `nn`), or weights in that
    dtype: `Transformer(config, torch.bfloat16).to(torch.bfloat16)`.

    Set `recompute` to n to trade time for memory: every n-th block keeps only its input for the backward pass
    and repeats its forward pass, except for what `kernels.dispatch` saves. The gradients stay the same bit
    for bit. With `selective` it repeats only its MLP, and keeps the inputs of attention.

    Set `chunked_loss` to compute the head and the loss together, some tokens at a time (`head_loss`), if the
    head is a plain matmul: a `torch.nn.Linear`, or a module with a dtype as its `plain_product`. The head's
    forward method is then not called, so hooks and gauges do not see it.

    Set `z_loss` to a coefficient to also train on the z-loss of `kernels.cross_entropy`, and `balance_loss`
    for the balance of experts (`experts.py`).

    If several processes compute each sequence together, `share` = (index, count) identifies the local one of
    `count` equal shares of its tokens. Ids and positions belong to the full sequence, results (logits, the
    term of the loss) to the local tokens, which see the others through `Block.to_heads`. A block that
    another process computes is an `nn.Identity`, and other modules may be None.
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.recompute, self.selective = 0, False
        self.chunked_loss = False
        self.z_loss = self.balance_loss = 0.0
        self.share = (0, 1)
        self.embedding = Embedding(config.vocab_size, config.dim)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.max_sequence_length, config.dim)
        self.blocks = nn.ModuleList(Block(config, compute_dtype, i) for i in range(config.layers))
        self.embedding_residual = Residual()
        self.embedding_dropout = make_dropout(config.dropout, 3 * config.layers)
        self.norm = Norm(config, compute_dtype)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_head()

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream between blocks."""
        return self.embedding_residual.dtype or torch.promote_types(torch.float32, self.compute_dtype)

    def tie_head(self) -> None:
        """Make the head's weight the embedding's, if the configuration ties them.

        Call it again after `to_empty`, which unties them; `initialize` does.
        """
        if self.config.tied_head:
            self.head.weight = self.embedding.weight

    def hidden(
        self, x_BT: Tensor, position_BT: Tensor | None = None, *, cache: Sequence[KVCache] | None = None
    ) -> Tensor:
        """Token ids (int64) -> the head's input: [B, T, D] in `compute_dtype`.

        Args:
            x_BT: The ids; with a `cache`, the ids of the tokens after the ones that the cache holds.
            position_BT: The position of each token in its document, which keeps documents separate: each is
                computed as if it stood alone at the start of a sequence.
            cache: Keys and values of earlier tokens, of each block; not together with `position_BT`.

        Raises:
            UserError: The sequence is longer than `max_sequence_length`.
        """
        start = 0 if cache is None else cache[0].length
        end = start + x_BT.shape[1]
        if end > self.config.max_sequence_length:
            raise UserError(
                f"a sequence of {end} tokens is longer than model.max_sequence_length = "
                f"{self.config.max_sequence_length}; shorten it or raise model.max_sequence_length"
            )
        x_BTD = self.embed(x_BT, position_BT, start)
        h_BTD: Tensor = self.norm(*self.through_blocks(x_BTD, start, end, position_BT, cache))
        return h_BTD

    def embed(self, x_BT: Tensor, position_BT: Tensor | None = None, start: int = 0) -> Tensor:
        """Token ids from position `start` on -> the residual stream before the first block, fp32."""
        x_BTD: Tensor = self.embedding(self.local_tokens(x_BT)).float()
        if self.config.positions == "learned":
            if position_BT is not None:
                x_BTD = x_BTD + self.position_embedding(self.local_tokens(position_BT)).float()
            else:
                weight_TD = self.position_embedding.weight[start : start + x_BT.shape[1]]
                x_BTD = x_BTD + self.local_tokens(weight_TD[None])[0].float()
        if self.embedding_dropout is not None:
            x_BTD = self.embedding_dropout(x_BTD, *self.share)
        stream_BTD: Tensor = self.embedding_residual(x_BTD)
        return stream_BTD

    def through_blocks(
        self,
        x_BTD: Tensor,
        start: int,
        end: int,
        position_BT: Tensor | None = None,
        cache: Sequence[KVCache] | None = None,
        blocks: Iterable[BlockCall] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream of tokens `start` to `end` after some or all blocks.

        Returns:
            (the stream, its pending addend or None), as the norm accepts them.
        """
        mask = None if position_BT is None else document_mask(position_BT)
        rope = None
        if self.config.positions == "rope":
            rope = rope_table(self.config, end, x_BTD.device)[:, start:]
            if position_BT is not None:
                rope = rope[:, position_BT][:, :, None]  # [2, B, 1, T, H/2]
        selected: Iterable[BlockCall] = self.blocks if blocks is None else blocks
        delta_BTD: Tensor | None = None
        for number, block in enumerate(selected):
            recomputes = self.recompute and number % self.recompute == 0 and cache is None
            if recomputes and self.selective:
                x_BTD, delta_BTD = block(x_BTD, delta_BTD, rope, mask, recomputed=_recomputed)
            elif recomputes:
                x_BTD = total(x_BTD, delta_BTD)  # the sum is kept, not its two terms
                x_BTD, delta_BTD = _recomputed(block, x_BTD, None, rope, mask)
            else:
                of_block = None if cache is None else cache[number]
                x_BTD, delta_BTD = block(x_BTD, delta_BTD, rope, mask, cache=of_block)
        return x_BTD, delta_BTD

    def forward(self, x_BT: Tensor, position_BT: Tensor | None = None) -> Tensor:
        """Token ids (int64) -> logits [B, T, V], in the dtype of the head's result."""
        logits_BTV: Tensor = self.head(self.hidden(x_BT, position_BT))
        return logits_BTV

    def loss(
        self, x_BT: Tensor, y_BT: Tensor, position_BT: Tensor | None = None, targets: int | None = None
    ) -> Tensor:
        """Mean cross entropy of predicting `y_BT` after each prefix of `x_BT`: fp32 scalar, nats.

        Where gradients are recorded, it is [3] with `z_loss`, as in `cross_entropy`, and [4] with
        `balance_loss`, as in `with_balance`: train on its first entry. `position_BT` is as for `hidden`,
        `targets` as for `cross_entropy`.
        """
        return self.loss_after(self.hidden(x_BT, position_BT), y_BT, targets)

    def loss_after(self, h_BTD: Tensor, y: Tensor, targets: int | None = None) -> Tensor:
        """`loss` of the local tokens, from the head's input; `y` [B, all tokens] is the full targets."""
        if targets is None and self.share[1] > 1:
            targets = y.numel()
        y_BT = self.local_tokens(y)
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        if self.chunks_loss and h_BTD.dtype == self.compute_dtype:
            add = getattr(self.head, "add_gradient", None)
            loss = head_loss(h_BTD, self.head.weight, y_BT, targets, z_loss, add)
        else:
            # the logits may be overwritten unless a hook keeps them
            loss = cross_entropy(self.head(h_BTD), y_BT, targets, not has_hooks(self.head), z_loss)
        if self.loss_shape == (4,) and torch.is_grad_enabled():
            return with_balance(loss, experts_of(self.blocks), self.balance_loss)
        return loss

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """The shape of a training loss."""
        if self.balance_loss and self.config.experts:
            return (4,)
        return (3,) if self.z_loss else ()

    @property
    def chunks_loss(self) -> bool:
        """Whether head and loss are computed together: `chunked_loss` is set, and the head allows it."""
        return self.chunked_loss and _plain_product(self.head) == self.compute_dtype

    def local_tokens(self, x: Tensor) -> Tensor:
        """The entries of x [B, T, ...] that belong to the local tokens."""
        index, count = self.share
        return x.chunk(count, 1)[index] if count > 1 else x


def _recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function and keep only its inputs: the backward pass calls it again."""
    options: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": contexts}
    # Random bits are a function of the step, so there is no generator state to save.
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _plain_product(head: nn.Module) -> torch.dtype | None:
    """The dtype of a head that only multiplies with its weight; None for any other head."""
    if type(head) is nn.Linear:
        return head.weight.dtype if head.bias is None else None
    dtype: torch.dtype | None = getattr(head, "plain_product", None)
    return dtype

"""The parts of a transformer block: norms and rotary positions; attention is in the room `kernels`.

    x = x + drop(attention_out(attention(qkv(norm(x)))))
    x = x + drop(down(act(up(norm(x)))))                act = gelu, or silu(gate) * up

Precision is explicit. The residual stream `x` is fp32 from the embedding to the last norm: it is a sum over
all layers, and a low-precision sum would lose exactly the small late terms. A norm computes in fp32 and
*emits* `compute_dtype`; the linear layers, the attention and the activation compute in the dtype of their
input; adding their result to the fp32 stream widens it again. There is no autocast anywhere.

Every matmul with a weight is a `torch.nn.Linear`, so that these four modules per block can be replaced. Two
pairs are fused because they read the same input: one larger GEMM is faster, and the input is quantized once.

    qkv.weight        rows [ q: N*H | k: K*H | v: K*H ]
    gate_up.weight    rows [ gate: F | up: F ]

The MLP, or with `experts` a mixture of several, is in `experts.py`. With `qk_norm` q and k
pass through a `HeadNorm` before they are rotated. `drop` is dropout, only in training; by default there is
none.

Norms, activations, rotary positions and attention come from the room `kernels`: plain torch, and one pass
each on a GPU. A norm also computes the sum before it, so it receives the stream and the addend; the last sum
of a block is computed by the next block's first norm, or by the model's. Attention and the two sums are
modules (`attention`, `attention_residual`, `mlp_residual`), which may be replaced by ones that compute in
other formats.

Rotary positions (Su et al., arXiv 2104.09864): in each head the pair (x[i], x[i + H/2]) is rotated by the
angle position * theta^(-2i/H), so that q . k depends only on the distance between two tokens. This is the
half-split layout of Hugging Face checkpoints; Meta's files interleave the pairs.

Legend: B sequences, T tokens, S tokens of keys (T, and more with a cache), D dim, N query heads,
K key-value heads, H head_dim, F ffn_dim.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.dispatch import last_product, use_kernels
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.kernels.heads import rotary, split_heads
from narrowgauge.kernels.norm import add_norm, norm
from narrowgauge.kernels.residual import Residual
from narrowgauge.system.torch_compat import has_hooks
from narrowgauge.trainer.models.config import ModelConfig
from narrowgauge.trainer.models.experts import Experts, add_mlp, mlp
from narrowgauge.trainer.models.kv_cache import KVCache
from narrowgauge.trainer.models.operators import cos_sin


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis: fp32 in, fp32 inside, `compute_dtype` out."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        self.kind, self.eps, self.compute_dtype = config.norm, config.norm_eps, compute_dtype
        self.weight = nn.Parameter(torch.ones(config.dim))
        has_bias = config.norm == "layer" and config.bias
        self.bias = nn.Parameter(torch.zeros(config.dim)) if has_bias else None

    def forward(self, x_BTD: Tensor, delta_BTD: Tensor | None = None) -> Tensor:
        """Normalize each token of x + delta; the weight and bias may be stored in any dtype."""
        return add_norm(x_BTD, delta_BTD, self.weight, self.bias, self.eps, self.kind, self.compute_dtype)[1]


class HeadNorm(nn.Module):
    """RMSNorm over each head of the queries or of the keys; all heads share one weight [H].

    It bounds q . k, and so the logits of attention (arXiv 2010.04245; Qwen3, arXiv 2505.09388).
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        self.eps, self.compute_dtype = config.norm_eps, compute_dtype
        self.weight = nn.Parameter(torch.ones(config.head_dim))

    def forward(self, x_BTNH: Tensor) -> Tensor:
        """Normalize each head of each token: fp32 inside, `compute_dtype` out."""
        return norm(x_BTNH, self.weight, None, self.eps, "rms", self.compute_dtype)


class StreamNorm(Norm):
    """A norm within the residual stream: adds to the stream first, and returns the stream and its norm.

    One pass writes both, and one pass adds the gradients of both in the backward pass.

    Attributes:
        keeps_terms: Whether it keeps x and the addend for the backward pass instead of the sum; saves memory
            where something else keeps x.
    """

    keeps_terms = False

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, delta_BTD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        options = self.eps, self.kind, self.compute_dtype, self.keeps_terms
        return add_norm(x_BTD, delta_BTD, self.weight, self.bias, *options)


def rope_table(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Cosines and sines for positions 0 to length-1: fp32, [2, length, head_dim / 2].

    The table is computed in each forward pass. It is small, and because it is not a buffer it can neither be
    cast down with the model nor be missing after a model was made on the meta device.

    Llama 3.1 extends the context by rotating slow pairs more slowly. A pair of frequency f makes
    original_positions * f / 2 pi turns in the original context; below `low` turns its frequency is divided by
    `factor`, above `high` it stays, and in between the two are blended linearly in the number of turns.
    """
    freqs = rope_frequencies(config, device)
    if config.rope_factor != 1:
        freqs = freqs * rope_shares(config, freqs)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), freqs)
    return cos_sin(angles)


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """The frequency of each pair before `rope_factor` stretches it: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    return 1.0 / config.rope_theta**exponents


def rope_shares(config: ModelConfig, freqs: Tensor) -> Tensor:
    """The share of each of `freqs` that `rope_factor` leaves: fp32 [head_dim / 2]."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_positions * freqs / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) / config.rope_factor + keep


# Above the tensor ids of layers (`nn.step_state`) and of the optimizer's.
_FIRST_STREAM = 2**40


def make_dropout(p: float, number: int) -> Dropout | None:
    """The dropout `number` of a model, with separate random bits; None if p is 0."""
    return Dropout(p, _FIRST_STREAM + number) if p else None


def _identity(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """One layer: attention, then the MLP, each normalized first and added to the residual stream.

    If the tokens of a sequence are divided over processes, `to_heads` maps some tokens of all heads [B, T,
    heads, H] to all tokens of some heads, and `to_tokens` inverts it; `heads_NKK` counts the former. `share`
    = (index, count) then identifies the local one of `count` equal shares of the tokens, `heads_share` that
    of the heads whose attention is computed here.
    """

    to_heads: Callable[[Tensor], Tensor]
    to_tokens: Callable[[Tensor], Tensor]

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype, number: int = 0):
        """Create block `number` of a model, from 0."""
        super().__init__()
        D, N, K, H = config.dim, config.heads, config.kv_heads, config.head_dim
        self.head_dim, self.heads_NKK = H, (N, K, K)
        self.to_heads = self.to_tokens = _identity
        self.share = self.heads_share = (0, 1)
        self.attention_norm = StreamNorm(config, compute_dtype)
        self.qkv = nn.Linear(D, (N + 2 * K) * H, bias=bool(config.qkv_bias))
        self.q_norm = HeadNorm(config, compute_dtype) if config.qk_norm else None
        self.k_norm = HeadNorm(config, compute_dtype) if config.qk_norm else None
        self.attention = Attention()
        self.attention_out = nn.Linear(N * H, D, bias=config.bias)
        self.attention_residual = Residual()
        self.mlp_norm = StreamNorm(config, compute_dtype)
        self.mlp_norm.keeps_terms = True  # attention's norm keeps the stream that it adds to
        self.experts = Experts(config) if config.experts else None
        if self.experts is None:
            add_mlp(self, config)
        self.mlp_residual = Residual()
        self.attention_dropout = make_dropout(config.attention_dropout, 3 * number)
        self.attention_out_dropout = make_dropout(config.dropout, 3 * number + 1)
        self.down_dropout = make_dropout(config.dropout, 3 * number + 2)

    def forward(
        self,
        x_BTD: Tensor,
        delta_BTD: Tensor | None,
        rope: Tensor | None,
        mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        recomputed: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to one sequence or more.

        Args:
            x_BTD: The residual stream, fp32; with a `cache`, of the tokens after those that the cache holds.
            delta_BTD: The pending addend of the stream, or None.
            rope: The table of `rotary`, or None.
            mask: The mask of `Attention`, or None.
            cache: Keys and values of earlier tokens.
            recomputed: Calls a function and keeps only its inputs for the backward pass; None calls it
                directly. The MLP is called through it, with the norm and the sum before it.

        Returns:
            (the stream, its pending addend or None).
        """
        x_BTD, normed_BTD = self.attention_norm(x_BTD, delta_BTD)
        y_BTD = self._attention(normed_BTD, rope, mask, cache)
        if recomputed is None:
            return self._after_attention(x_BTD, y_BTD)
        pair: tuple[Tensor, Tensor | None] = recomputed(self._after_attention, x_BTD, y_BTD)
        return pair

    def _after_attention(self, x_BTD: Tensor, y_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rest of the layer, from the stream and attention's addend."""
        x_BTD, normed_BTD = self.mlp_norm(*self.attention_residual.pending(x_BTD, y_BTD))
        y_BTD = self._mlp(normed_BTD)
        if self.down_dropout is not None:
            y_BTD = self.down_dropout(y_BTD, *self.share)
        return self.mlp_residual.pending(x_BTD, y_BTD)

    def _attention(
        self, x_BTD: Tensor, rope: Tensor | None, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        q, k, v = self._heads(x_BTD, rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        drops = self.training and torch.is_grad_enabled()
        dropout = self.attention_dropout if drops else None
        y_BNTH = self.attention(q, k, v, mask, dropout, self.heads_share)
        y_BTD: Tensor = self.attention_out(self.to_tokens(y_BNTH.transpose(1, 2)).flatten(2))
        if self.attention_out_dropout is not None:
            y_BTD = self.attention_out_dropout(y_BTD, *self.share)
        return y_BTD

    def _heads(self, x_BTD: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, rotated; in one pass after the matmul if nothing comes in between.

        A hook on the matmul sees its bias added.
        """
        if self.q_norm is None and self.to_heads is _identity:
            can_leave = getattr(self.qkv, "can_leave_bias", False) and not has_hooks(self.qkv)
            leaves_bias = can_leave and use_kernels(x_BTD)
            options = {"with_bias": False} if leaves_bias else {}
            qkv_BTC = self.qkv(x_BTD, **options)
            bias_C = self.qkv.bias if leaves_bias else None
            return split_heads(qkv_BTC, bias_C, rope, self.heads_NKK, self.head_dim)
        heads_BTNH = self.qkv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads_BTNH.split(self.heads_NKK, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (self.to_heads(h).transpose(1, 2) for h in (q, k, v))
        return (q, k, v) if rope is None else (rotary(q, rope), rotary(k, rope), v)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        if self.experts is not None:
            y_BTD: Tensor = self.experts(x_BTD)
            return y_BTD
        is_plain = self.down_dropout is None and self.mlp_residual.is_plain(x_BTD.dtype)
        is_last = is_plain and not torch.compiler.is_compiling()
        return mlp(self, x_BTD, last_product if is_last else nullcontext)

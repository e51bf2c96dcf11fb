"""The parts of a transformer block: normalisation, rotary positions, attention, MLP.

    x = x + attention_out(attention(qkv(norm(x))))
    x = x + down(act(up(norm(x))))                      act = gelu, or silu(gate) * up

Precision is explicit. The residual stream `x` is fp32 from the embedding to the last norm: it is a sum over
all layers, and a narrow sum would lose exactly the small late terms. A norm computes in fp32 and *emits*
`compute_dtype`; the linear layers, the attention and the activation compute in the dtype of their input;
adding their result to the fp32 stream widens it again. There is no autocast anywhere.

Every product with a weight is a `torch.nn.Linear`, so that these four modules per block can be replaced. Two
pairs are fused because they read the same input: one larger GEMM is faster, and the input is quantized once.

    qkv.weight        rows [ q: N*H | k: K*H | v: K*H ]
    gate_up.weight    rows [ gate: F | up: F ]

Norms, activations and rotary positions are those of the room `kernels`: plain torch, and one pass each on a
GPU. The mlp_norm also computes the first of the two sums above, so it gets the stream and the term to add.

Rotary positions (Su et al., arXiv 2104.09864): in each head the pair (x[i], x[i + H/2]) is turned by the
angle position * theta^(-2i/H), so that q . k depends on the distance of two tokens only. This is the
half-split layout of Hugging Face checkpoints; Meta's own files interleave the pairs.

Legend: B sequences, T tokens, S tokens of keys (T, and more with a cache), D dim, N query heads,
K key-value heads, H head_dim, F ffn_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.kernels.activation import gelu, swiglu
from narrowgauge.kernels.dispatch import fastest_first, is_slow
from narrowgauge.kernels.norm import add_norm, norm
from narrowgauge.kernels.rotary import rotary
from narrowgauge.models.config import ModelConfig
from narrowgauge.models.kv_cache import LayerKVCache


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis: fp32 in, fp32 inside, `compute_dtype` out."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        self.kind, self.eps, self.compute_dtype = config.norm, config.norm_eps, compute_dtype
        self.weight = nn.Parameter(torch.ones(config.dim))
        has_bias = config.norm == "layer" and config.bias
        self.bias = nn.Parameter(torch.zeros(config.dim)) if has_bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalise each token; the weight and bias may be stored in any dtype."""
        return norm(x_BTD, self.weight, self.bias, self.eps, self.kind, self.compute_dtype)


class StreamNorm(Norm):
    """A norm within the residual stream: adds to the stream first, and returns the stream and its norm.

    One pass writes both, and one pass adds the gradients of both in the backward pass.
    """

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, delta_BTD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return add_norm(x_BTD, delta_BTD, self.weight, self.bias, self.eps, self.kind, self.compute_dtype)


def rope_table(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Cosines and sines for positions 0 to length-1: fp32, [2, length, head_dim / 2].

    The table is computed in each forward pass. It is small, and because it is no buffer it can neither be
    cast down with the model nor be missing after a model was made on the meta device.

    Llama 3.1 stretches the context by turning slow pairs slower. A pair of frequency f makes
    original_positions * f / 2 pi turns in the original context; below `low` turns its frequency is divided by
    `factor`, above `high` it stays, and in between the two are blended linearly in the turns.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    freqs = 1.0 / config.rope_theta**exponents
    if config.rope_factor != 1:
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = config.rope_original_positions * freqs / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freqs = freqs * ((1 - keep) / config.rope_factor + keep)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), freqs)
    return torch.stack([angles.cos(), angles.sin()])


def document_mask(position_BT: Tensor) -> Tensor:
    """The causal mask that keeps documents separate: [B, 1, T, T] bool, True where query t sees key s.

    `position_BT` is the number of each token in its document, within the sequence. Token t sees the last
    position(t) + 1 tokens, which are those of its document: the mask is block-diagonal. It takes T x T bytes
    for each sequence.
    """
    t_T = torch.arange(position_BT.shape[1], device=position_BT.device)
    back_TT = t_T[:, None] - t_T
    return ((back_TT >= 0) & (back_TT <= position_BT[..., None]))[:, None]


def attend(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention -> [B, N, T, H], causal or under `mask`; query head n reads key-value head n // (N / K).

    A single query is that of the last token, and reads everything.

    Grouped heads are left to a kernel that supports them. On a GPU no fused kernel does in fp32 or under a
    mask, and torch would fall back to one that holds all T x T scores, so there the heads are repeated.

    A CPU without products in bf16 computes it in fp32, which takes a quarter of the time and keeps operands
    that are twice as wide.
    """
    if q_BNTH.is_meta:
        return _MetaAttention.apply(q_BNTH, k_BKSH, v_BKSH, mask)
    if q_BNTH.dtype == torch.bfloat16 and is_slow(q_BNTH):
        return attend(q_BNTH.float(), k_BKSH.float(), v_BKSH.float(), mask).to(q_BNTH.dtype)
    groups = q_BNTH.shape[1] // k_BKSH.shape[1]
    narrow = q_BNTH.dtype in (torch.float16, torch.bfloat16)
    native = q_BNTH.device.type == "cpu" or (narrow and mask is None)
    if groups > 1 and not native:
        k_BKSH, v_BKSH = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSH))
    with fastest_first(q_BNTH.device):
        return nn.functional.scaled_dot_product_attention(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            mask,
            is_causal=mask is None and q_BNTH.shape[2] > 1,
            enable_gqa=groups > 1 and native,
        )


class _MetaAttention(torch.autograd.Function):
    """A stand-in for fused attention on the meta device: keeps its operands, its output, one fp32 a row.

    Torch has no fused attention for the meta device and would hold all T x T scores.
    """

    @staticmethod
    def forward(ctx: Any, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
        out_BNTH = torch.empty_like(q_BNTH)
        row_BNT = torch.empty(q_BNTH.shape[:-1], device=q_BNTH.device)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, out_BNTH, row_BNT, mask)
        return out_BNTH

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:
        return *(torch.empty_like(t) for t in ctx.saved_tensors[:3]), None


def _identity(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """One layer: attention, then the MLP, each normalised first and added to the residual stream.

    If the tokens of a sequence are divided over processes, `to_heads` turns some tokens of all heads
    [B, T, heads, H] into all tokens of some heads, and `to_tokens` undoes it; `heads_NKK` counts the former.
    """

    to_heads: Callable[[Tensor], Tensor]
    to_tokens: Callable[[Tensor], Tensor]

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype):
        super().__init__()
        D, N, K, H = config.dim, config.heads, config.kv_heads, config.head_dim
        self.head_dim, self.heads_NKK, self.mlp = H, (N, K, K), config.mlp
        self.to_heads = self.to_tokens = _identity
        self.attention_norm = StreamNorm(config, compute_dtype)
        self.qkv = nn.Linear(D, (N + 2 * K) * H, bias=bool(config.qkv_bias))
        self.attention_out = nn.Linear(N * H, D, bias=config.bias)
        self.mlp_norm = StreamNorm(config, compute_dtype)
        if config.mlp == "swiglu":
            self.gate_up = nn.Linear(D, 2 * config.ffn_dim, bias=config.bias)
        else:
            self.up = nn.Linear(D, config.ffn_dim, bias=config.bias)
        self.down = nn.Linear(config.ffn_dim, D, bias=config.bias)

    def forward(
        self,
        x_BTD: Tensor,
        rope: Tensor | None,
        mask: Tensor | None = None,
        *,
        cache: LayerKVCache | None = None,
    ) -> Tensor:
        """fp32 residual stream in and out; `rope` and `mask` are those of `rotary` and `attend`, or None.

        With a `cache`, `x_BTD` are the tokens after those that the cache holds.
        """
        x_BTD, normed_BTD = self.attention_norm(x_BTD)
        x_BTD, normed_BTD = self.mlp_norm(x_BTD, self._attention(normed_BTD, rope, mask, cache))
        return x_BTD + self._mlp(normed_BTD)

    def _attention(
        self, x_BTD: Tensor, rope: Tensor | None, mask: Tensor | None, cache: LayerKVCache | None
    ) -> Tensor:
        heads_BTNH = self.qkv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q, k, v = (self.to_heads(h).transpose(1, 2) for h in heads_BTNH.split(self.heads_NKK, dim=2))
        if rope is not None:
            q, k = rotary(q, rope), rotary(k, rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        y_BTNH = self.to_tokens(attend(q, k, v, mask).transpose(1, 2))
        y_BTD: Tensor = self.attention_out(y_BTNH.flatten(2))
        return y_BTD

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = swiglu(self.gate_up(x_BTD)) if self.mlp == "swiglu" else gelu(self.up(x_BTD))
        y_BTD: Tensor = self.down(hidden_BTF)
        return y_BTD

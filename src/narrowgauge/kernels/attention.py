"""Attention of all heads, causal or with separate documents; uses torch's fused kernels where there are any.

    z_ts = q_t . k_s / sqrt(H) for s <= t, else -inf        p_t = softmax(z_t)        y_t = sum_s p_ts v_s

With dropout on the probabilities p, no fused kernel can be used: their masks come from their internal
generators and would change with the number of devices. All T x T scores are then computed and held in memory.

`Attention` is the module in which a model computes all this; it can be replaced by one with another
implementation.

Legend: B sequences, T tokens, S tokens of keys (T, and more with a cache), N query heads, K key-value heads,
H head_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.kernels.attention_in_order import attend_in_order, supports
from narrowgauge.kernels.dispatch import attention_backends, chosen_attention, is_slow
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.system.devices import GpuWork, emit, is_shape_only
from narrowgauge.system.second_derivative import FirstOrderFunction


def document_mask(position_BT: Tensor) -> Tensor:
    """The causal mask that separates documents: [B, 1, T, T] bool, True where query t sees key s.

    `position_BT` is the position of each token in its document, within the sequence. Token t sees the last
    position(t) + 1 tokens, which belong to its document: the mask is block-diagonal. It uses T x T bytes
    per sequence.
    """
    t_T = torch.arange(position_BT.shape[1], device=position_BT.device)
    back_TT = t_T[:, None] - t_T
    return ((back_TT >= 0) & (back_TT <= position_BT[..., None]))[:, None]


def attend(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention -> [B, N, T, H], causal or under `mask`; query head n reads key-value head n // (N / K).

    A single query is that of the last token, and attends to everything.

    Grouped heads are left to a kernel that supports them. On a GPU no fused kernel does in fp32 or with a
    mask, and torch would fall back to an implementation that holds all T x T scores, so there the heads are
    repeated.

    A CPU computes causal attention of bf16 values by `attend_in_order` if the run has chosen it. It computes
    attention in fp32 where a run has chosen that, and of bf16 values where it lacks bf16 matmuls. That takes
    a quarter of the time or less, and keeps operands that are twice as wide.
    """
    way, narrow = chosen_attention(), q_BNTH.dtype in (torch.float16, torch.bfloat16)
    if way == "in-order" and supports(q_BNTH, k_BKSH, v_BKSH, mask):
        return attend_in_order(q_BNTH, k_BKSH, v_BKSH)
    if is_slow(q_BNTH) and (way == "fp32" or q_BNTH.dtype == torch.bfloat16):
        return attend(q_BNTH.float(), k_BKSH.float(), v_BKSH.float(), mask).to(q_BNTH.dtype)
    groups = q_BNTH.shape[1] // k_BKSH.shape[1]
    native = q_BNTH.device.type == "cpu" or is_shape_only(q_BNTH) or (narrow and mask is None)
    if groups > 1 and not native:
        k_BKSH, v_BKSH = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSH))
    if q_BNTH.is_meta:
        return _MetaAttention.apply(q_BNTH, k_BKSH, v_BKSH, mask)
    with attention_backends(q_BNTH.device, mask is not None):
        return nn.functional.scaled_dot_product_attention(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            mask,
            is_causal=mask is None and q_BNTH.shape[2] > 1,
            enable_gqa=groups > 1 and native,
        )


class _MetaAttention(FirstOrderFunction):
    """A stand-in for fused attention on the meta device: keeps its operands, its output, one fp32 per row.

    Torch has no fused attention for the meta device and would hold all T x T scores.
    """

    @staticmethod
    def forward(ctx: Any, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
        out_BNTH = torch.empty_like(q_BNTH)
        row_BNT = torch.empty(q_BNTH.shape[:-1], dtype=torch.float32, device=q_BNTH.device)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, out_BNTH, row_BNT, mask)
        causal = mask is None and q_BNTH.shape[2] > 1
        ctx.flops = 4.0 * q_BNTH.numel() * k_BKSH.shape[2] / (2 if causal else 1)
        if not is_shape_only(q_BNTH):
            written = (out_BNTH, row_BNT)
            emit(GpuWork("attention forward", (q_BNTH, k_BKSH, v_BKSH), written, ctx.flops, "attention"))
        return out_BNTH

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors[:5]
        gradients = tuple(torch.empty_like(t) for t in kept[:3])
        if not is_shape_only(grad_BNTH):
            read = (grad_BNTH, *kept)
            emit(GpuWork("attention backward", read, gradients, 2.5 * ctx.flops, "attention", launches=3))
        return *gradients, None


def attend_with_dropout(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | None,
    dropout: Dropout,
    index: int = 0,
    count: int = 1,
) -> Tensor:
    """`attend` for as many queries as keys, with dropout on the probabilities.

    Matmuls are in the operands' dtype, the softmax is in fp32 (fp64 for fp64 operands). The heads are the
    `index`-th of `count` equal shares of all heads.
    """
    if is_slow(q_BNTH):
        wide = attend_with_dropout(
            q_BNTH.float(), k_BKSH.float(), v_BKSH.float(), mask, dropout, index, count
        )
        return wide.to(q_BNTH.dtype)
    groups, T = q_BNTH.shape[1] // k_BKSH.shape[1], q_BNTH.shape[2]
    k_BNSH, v_BNSH = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSH))
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q_BNTH.device).tril()
    z_BNTS = ((q_BNTH * q_BNTH.shape[3] ** -0.5) @ k_BNSH.transpose(2, 3)).masked_fill(~mask, float("-inf"))
    p_BNTS = z_BNTS.to(torch.promote_types(z_BNTS.dtype, torch.float32)).softmax(dim=-1)
    return dropout(p_BNTS, index, count).to(v_BNSH.dtype) @ v_BNSH


class Attention(nn.Module):
    """The attention of one layer, without parameters: its matmuls, and the softmax between them."""

    def forward(
        self,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        mask: Tensor | None = None,
        dropout: Dropout | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Tensor:
        """Attention -> [B, N, T, H], as `attend`; with `dropout` as `attend_with_dropout`.

        `share` = (index, count): the heads are the index-th of `count` equal shares of all heads.
        """
        if dropout is not None:
            return attend_with_dropout(q_BNTH, k_BKSH, v_BKSH, mask, dropout, *share)
        return attend(q_BNTH, k_BKSH, v_BKSH, mask)

"""The heads of attention: rotary positions; and bias, positions and split of the qkv matmul's output.

**Rotary positions** (Su et al., arXiv 2104.09864) rotate a pair (x[i], x[i + H/2]) of a head by an angle:

    y[i]       = x[i] * cos - x[i + H/2] * sin
    y[i + H/2] = x[i + H/2] * cos + x[i] * sin          fp32, rounded once to the dtype of x

The backward pass rotates back by the same angle, in fp32 and rounded once; torch's derivative of the lines
above rounds each product to the dtype of x and then their sum, because the operands had that dtype.

**The split** is done in the same pass:

    qkv        rows of C = (N + 2K) H values: [ q: N*H | k: K*H | v: K*H ]
    forward    z = qkv + bias, rounded;  q, k = rotated(z), rounded;  v = z
    backward   dqkv = [ rotated back(dq) | rotated back(dk) | dv ], rounded once;  dbias = its sum over tokens

The three heads are in one tensor in the order of `qkv`, token by token, which is how attention reads them. So
the backward pass concatenates nothing, and only that tensor is kept for it. The values match `reference`
rounding for rounding; the gradients of q and k are rounded once. Heads that are rotated separately (`rotary`)
are read in place, and written in the same order of axes.

Bytes per element, in a 2-byte dtype, where at most a third of the heads of qkv are value heads:

    rotary   forward    separate   four multiplies 2+4 and two sums 8+4 (of halves), concatenation 4+4,
                                   rounding 4+2                                                       38
                        fused      2+2, the angles from the cache                                      4
             backward   separate   widening 2+4, a sign 4+4, four multiplies 4+4 with their rounding
                                   4+2 and two sums 4+2 (of halves), concatenation 2+2                48
                        fused      2+2                                                                 4
    split    forward    separate   bias 2+2, rotated heads 2+2                                         8
                        fused      2+2                                                                 4
             backward   separate   rotated heads 2+2, concatenation 2+2, sum 2, amax 2                12
                        fused      2+2, and the partial sums of the bias                               4

The kernel also computes max |dqkv| (`kernels.amax`).

In a single process on a CPU, C (`quantization/passes/layers.c`) rotates bf16 heads with the bits of torch and
its derivative: the same operations, each rounded as there, in one pass. With a bias, torch computes them.

Legend: B sequences, T tokens, N query heads, K key-value heads, H head_dim, C values of qkv.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.dispatch import in_rows, use_kernels
from narrowgauge.quantization.passes.build import struct
from narrowgauge.quantization.passes.in_c import call, computes_layer
from narrowgauge.system.devices import is_shape_only
from narrowgauge.system.second_derivative import FirstOrderFunction

Heads = tuple[Tensor, Tensor, Tensor]


def rotary(x_BNTH: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of each head by the angle of its position.

    Args:
        x_BNTH: The heads.
        table: Cosines and sines, fp32: [2, T, H/2], or [2, B, 1, T, H/2] with separate angles per sequence.

    Returns:
        The rotated heads, in the dtype of `x_BNTH`.
    """
    if use_kernels(x_BNTH):
        from narrowgauge.kernels.triton.heads import rotated

        turned: Tensor = _Rotary.apply(x_BNTH, table, rotated)
        return turned
    if _is_for_c(x_BNTH, table):
        turned = _Rotary.apply(x_BNTH, table, _rotate_in_c)
        return turned
    return rotary_reference(x_BNTH, table)


def rotary_reference(x_BNTH: Tensor, table: Tensor) -> Tensor:
    """`rotary` in plain torch."""
    cos, sin = table.unbind()
    a, b = x_BNTH.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BNTH.dtype)


def split_heads(
    qkv_BTC: Tensor, bias_C: Tensor | None, table: Tensor | None, heads_NKK: Sequence[int], head_dim: int
) -> Heads:
    """Split the qkv output into the heads of queries, keys and values.

    Args:
        qkv_BTC: The matmul's output, without its bias.
        bias_C: The bias in any float dtype, or None.
        table: Cosines and sines of `rotary`, or None: no positions.
        heads_NKK: The numbers of query, key and value heads.
        head_dim: H.

    Returns:
        q [B, N, T, H], k and v [B, K, T, H], in the dtype of `qkv_BTC`.
    """
    if use_kernels(qkv_BTC) and not (bias_C is None and table is None):
        from narrowgauge.kernels.triton.heads import SplitHeads

        q, k, v = SplitHeads.apply(qkv_BTC, bias_C, table, tuple(heads_NKK), head_dim)
        return q, k, v
    if bias_C is None and table is not None and _is_for_c(qkv_BTC, table):
        q, k, v = _SplitHeadsInC.apply(qkv_BTC, table, tuple(heads_NKK), head_dim)
        return q, k, v
    return reference(qkv_BTC, bias_C, table, heads_NKK, head_dim)


def reference(
    qkv_BTC: Tensor, bias_C: Tensor | None, table: Tensor | None, heads_NKK: Sequence[int], head_dim: int
) -> Heads:
    """`split_heads` in plain torch."""
    if bias_C is not None:
        qkv_BTC = qkv_BTC + bias_C.to(qkv_BTC.dtype)
    q, k, v = _heads_of(qkv_BTC, heads_NKK, head_dim)
    return (q, k, v) if table is None else (rotary_reference(q, table), rotary_reference(k, table), v)


class _Rotary(FirstOrderFunction):
    """`rotary` by a kernel, or of bf16 heads on a CPU in C (`rotate`)."""

    @staticmethod
    def forward(ctx: Any, x_BNTH: Tensor, table: Tensor, rotate: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(table)
        ctx.rotate = rotate
        return rotate(x_BNTH, table, is_back=False)

    @staticmethod
    def backward(ctx: Any, grad_BNTH: Tensor) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return ctx.rotate(grad_BNTH, table, is_back=True), None, None


class _SplitHeadsInC(FirstOrderFunction):
    """`split_heads` of bf16 heads on a CPU, with positions and without a bias."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BTC: Tensor, table: Tensor, heads_NKK: tuple[int, ...], head_dim: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table)
        ctx.heads_NKK = heads_NKK
        heads = _heads_of(qkv_BTC, heads_NKK, head_dim)
        outs = [x.new_empty(x.shape) for x in heads]
        for x, out in zip(heads[:2], outs[:2], strict=True):
            _rotate_in_c(x, table, False, out)
        outs[2].copy_(heads[2])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (table,) = ctx.saved_tensors
        B, _, T, H = grads[0].shape
        dqkv_BTC = grads[0].new_empty((B, T, sum(ctx.heads_NKK) * H))
        outs = _heads_of(dqkv_BTC, ctx.heads_NKK, H)
        for grad, out in zip(grads[:2], outs[:2], strict=True):
            _rotate_in_c(grad, table, True, out)
        outs[2].copy_(grads[2])
        return dqkv_BTC, None, None, None


def _heads_of(x_BTC: Tensor, heads_NKK: Sequence[int], head_dim: int) -> list[Tensor]:
    """The heads [B, heads, T, H] of queries, keys and values, as views."""
    return [h.transpose(1, 2) for h in x_BTC.unflatten(-1, (-1, head_dim)).split(list(heads_NKK), dim=2)]


def _is_for_c(x: Tensor, table: Tensor) -> bool:
    """Whether C rotates heads on a CPU; it has the bits of `reference` and of its derivative."""
    return (x.dtype, table.dtype) == (torch.bfloat16, torch.float32) and computes_layer(x, table)


def _rotate_in_c(x_BNTH: Tensor, table: Tensor, is_back: bool, out_BNTH: Tensor | None = None) -> Tensor:
    """Rotate heads, forward or back, into `out_BNTH`."""
    out_BNTH = x_BNTH.new_empty(x_BNTH.shape) if out_BNTH is None else out_BNTH
    B, N, T, H = x_BNTH.shape
    x_BNTH = in_rows(x_BNTH)
    if is_shape_only(x_BNTH):
        return out_BNTH
    cos, sin = in_rows(table).unbind()
    one = struct("Rotary")(heads=N, tokens=T, half=H // 2, is_back=is_back)
    for name, x in (("x", x_BNTH), ("out", out_BNTH)):
        setattr(one, name, x.data_ptr())
        setattr(one, f"{name}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    one.cos, one.sin = cos.data_ptr(), sin.data_ptr()
    one.table_strides = (ctypes.c_int64 * 2)(cos.stride(0) if cos.ndim > 2 else 0, cos.stride(-2))
    call("rotary_pass", one, B * N, x_BNTH.numel())
    return out_BNTH

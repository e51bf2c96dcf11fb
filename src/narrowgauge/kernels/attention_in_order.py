"""Causal attention of bf16 values on a CPU, in C or in torch, with the same bits.

    z_ts = scale (q_t . k_s), s <= t      p_ts = exp(z_ts - m_t) / l_t      y_t = sum_s bf16(p_ts) v_s
    dp_ts = do_t . v_s                    ds_ts = bf16(p_ts (dp_ts - do_t . y_t))
    dq_t = scale sum_s ds_ts k_s          dk_s = scale sum_t ds_ts q_t          dv_s = sum_t bf16(p_ts) do_t

with scale = 1 / sqrt(H), m_t the largest z_ts of a row and l_t the sum of its exponentials. It rounds where
torch's fused attention does: probabilities and ds to bf16 before their matmuls, and the results. Everything
else is fp32.

Every product is one of two bf16 values, which fp32 holds exactly, and every sum adds in the order of its
index (those over a row in 16 lanes). So the digits are the same on every CPU, for any number of threads, and
for any batch: the twin in torch, which adds term by term, has the bits of the C. Only a product below
1e-38 is not exact; such a term is far below the last digit of a sum.

The C holds the scores of eight queries at a time, and skips those after the diagonal. A v_s that is not
finite makes the results of up to seven queries before s NaN as well, and in the twin all results. Bytes in
memory per layer: q, k, v, y, and 8 for each row (m and 1 / l). It runs where a run has chosen it
(`dispatch.choose_attention`).

Legend: B sequences, T tokens, N query heads, K key-value heads, H head_dim, G = N / K query heads of a
key-value head, S = T keys.
"""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.dispatch import is_traced
from narrowgauge.quantization.passes.build import struct
from narrowgauge.quantization.passes.in_c import c_library, call
from narrowgauge.system.second_derivative import FirstOrderFunction

LANES = 16  # of a sum over a row, and the unit of head_dim
_LOWEST = -87.0  # below it e^x counts as zero


def supports(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None = None) -> bool:
    """Whether `attend_in_order` supports this attention: causal, of bf16 values, plain tensors on a CPU."""
    if q_BNTH.dtype != torch.bfloat16 or mask is not None:
        return False
    is_square = 1 < q_BNTH.shape[2] == k_BKSH.shape[2]
    is_plain = all(type(x) is Tensor and x.device.type == "cpu" for x in (q_BNTH, k_BKSH, v_BKSH))
    return is_square and is_plain and q_BNTH.shape[3] % LANES == 0 and q_BNTH.numel() > 0


def attend_in_order(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """Causal attention -> [B, N, T, H], a view of [B, T, N, H]; see `supports`."""
    y_BTNH, _ = _Attention.apply(q_BNTH, k_BKSH, v_BKSH)
    y_BNTH: Tensor = y_BTNH.transpose(1, 2)
    return y_BNTH


class _Attention(FirstOrderFunction):
    """Keeps its operands, its result, and m and 1 / l of each row."""

    @staticmethod
    def forward(ctx: Any, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        function = _forward_operator if is_traced() else forward
        y_BTNH, stats_BNT2 = function(q_BNTH, k_BKSH, v_BKSH)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, y_BTNH, stats_BNT2)
        ctx.mark_non_differentiable(stats_BNT2)
        return y_BTNH, stats_BNT2

    @staticmethod
    def backward(ctx: Any, grad_BTNH: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
        q_BNTH, k_BKSH, v_BKSH, y_BTNH, stats_BNT2 = ctx.saved_tensors
        function = _backward_operator if is_traced() else backward
        gradients = function(q_BNTH, k_BKSH, v_BKSH, y_BTNH, stats_BNT2, grad_BTNH)
        return tuple(d.transpose(1, 2) for d in gradients)


def forward(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
    """(the result, bf16 [B, T, N, H]; m and 1 / l of each row, fp32 [B, N, T, 2])."""
    if not has_c():
        return reference_forward(q_BNTH, k_BKSH, v_BKSH)
    y_BTNH, stats_BNT2 = _results(q_BNTH)
    tensors = {"q": q_BNTH, "k": k_BKSH, "v": v_BKSH, "y": y_BTNH.transpose(1, 2)}
    _call("attention_forward", tensors, stats_BNT2)
    return y_BTNH, stats_BNT2


def backward(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, y_BTNH: Tensor, stats_BNT2: Tensor, grad_BTNH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, bf16 [B, T, N or K, H]."""
    if not has_c():
        return reference_backward(q_BNTH, k_BKSH, v_BKSH, y_BTNH, stats_BNT2, grad_BTNH)
    dq_BTNH, dk_BSKH, dv_BSKH = (_heads_last(x) for x in (q_BNTH, k_BKSH, v_BKSH))
    tensors = {"q": q_BNTH, "k": k_BKSH, "v": v_BKSH}
    tensors |= {"out": y_BTNH.transpose(1, 2), "grad": grad_BTNH.transpose(1, 2)}
    tensors |= {name: x.transpose(1, 2) for name, x in (("dq", dq_BTNH), ("dk", dk_BSKH), ("dv", dv_BSKH))}
    _call("attention_backward", tensors, stats_BNT2)
    return dq_BTNH, dk_BSKH, dv_BSKH


_forward_operator = torch.library.custom_op("narrowgauge::attention", forward, mutates_args=())
_backward_operator = torch.library.custom_op("narrowgauge::attention_backward", backward, mutates_args=())


_forward_operator.register_fake(lambda q_BNTH, *_: _results(q_BNTH))
_backward_operator.register_fake(lambda *heads: tuple(map(_heads_last, heads[:3])))


def _results(q_BNTH: Tensor) -> tuple[Tensor, Tensor]:
    return _heads_last(q_BNTH), q_BNTH.new_empty((*q_BNTH.shape[:3], 2), dtype=torch.float32)


def _heads_last(x_BNTH: Tensor) -> Tensor:
    B, N, T, H = x_BNTH.shape
    return x_BNTH.new_empty((B, T, N, H))


def has_c() -> bool:
    """Whether the C computes it; else the twin does."""
    return os.environ.get("NARROWGAUGE_KERNELS") != "0" and c_library() is not None


def _call(name: str, tensors: dict[str, Tensor], stats_BNT2: Tensor) -> None:
    """Call a function of `attention.c`; threads share the key-value heads."""
    B, N, T, H = tensors["q"].shape
    kv_heads = tensors["k"].shape[1]
    one = struct("Attention")(batch=B, heads=N, kv_heads=kv_heads, tokens=T, dim=H, scale=H**-0.5)
    one.stats = stats_BNT2.data_ptr()
    kept = []
    for name_of, x in tensors.items():
        if x.stride(3) != 1:
            x = x.contiguous()
            kept.append(x)
        setattr(one, name_of, x.data_ptr())
        setattr(one, f"{name_of}_strides", (ctypes.c_int64 * 3)(*x.stride()[:3]))
    call(name, one, B * kv_heads, B * N * T * T)


def reference_forward(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `forward`, term by term."""
    scale, T = torch.tensor(q_BNTH.shape[3] ** -0.5, device="cpu"), q_BNTH.shape[2]
    q_BKGTH, (k_BKSH, v_BKSH) = _grouped(q_BNTH, k_BKSH), (k_BKSH.float(), v_BKSH.float())
    z_BKGTS = _multiply_in_order(q_BKGTH, k_BKSH[:, :, None].transpose(3, 4))
    causal_TS = torch.ones(T, T, dtype=torch.bool, device=q_BNTH.device).tril()
    m_BKGT = z_BKGTS.masked_fill(~causal_TS, float("-inf")).amax(-1) * scale
    e_BKGTS = (exponential(z_BKGTS * scale - m_BKGT[..., None])).masked_fill(~causal_TS, 0)
    l_BKGT = 1 / _row_sum(e_BKGTS)
    p_BKGTS = (e_BKGTS * l_BKGT[..., None]).bfloat16().float()
    y_BNTH = _multiply_in_order(p_BKGTS, v_BKSH[:, :, None]).flatten(1, 2).bfloat16()
    stats_BNT2 = torch.stack([m_BKGT, l_BKGT], -1).flatten(1, 2)
    return y_BNTH.transpose(1, 2).contiguous(), stats_BNT2


def reference_backward(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, y_BTNH: Tensor, stats_BNT2: Tensor, grad_BTNH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of `backward`, term by term."""
    scale, T = torch.tensor(q_BNTH.shape[3] ** -0.5, device="cpu"), q_BNTH.shape[2]
    q_BKGTH, y_BKGTH, g_BKGTH = (
        _grouped(x, k_BKSH) for x in (q_BNTH, y_BTNH.transpose(1, 2), grad_BTNH.transpose(1, 2))
    )
    k_BKSH, v_BKSH = k_BKSH.float(), v_BKSH.float()
    m_BKGT1, l_BKGT1 = stats_BNT2.unflatten(1, q_BKGTH.shape[1:3])[..., None].unbind(-2)
    causal_TS = torch.ones(T, T, dtype=torch.bool, device=q_BNTH.device).tril()
    z_BKGTS = _multiply_in_order(q_BKGTH, k_BKSH[:, :, None].transpose(3, 4))
    dp_BKGTS = _multiply_in_order(g_BKGTH, v_BKSH[:, :, None].transpose(3, 4))
    p_BKGTS = exponential(z_BKGTS * scale - m_BKGT1).masked_fill(~causal_TS, 0) * l_BKGT1
    delta_BKGT1 = _row_sum(g_BKGTH * y_BKGTH)[..., None]
    ds_BKGTS = (p_BKGTS * (dp_BKGTS - delta_BKGT1)).bfloat16().float()
    dq_BNTH = (_multiply_in_order(ds_BKGTS, k_BKSH[:, :, None]) * scale).flatten(1, 2)
    ds_BKSR, p_BKSR = (x.flatten(2, 3).transpose(2, 3) for x in (ds_BKGTS, p_BKGTS.bfloat16().float()))
    dk_BKSH = _multiply_in_order(ds_BKSR, q_BKGTH.flatten(2, 3)) * scale
    dv_BKSH = _multiply_in_order(p_BKSR, g_BKGTH.flatten(2, 3))
    return tuple(  # type: ignore[return-value]
        d.bfloat16().transpose(1, 2).contiguous() for d in (dq_BNTH, dk_BKSH, dv_BKSH)
    )


def exponential(x: Tensor) -> Tensor:
    """e^x of fp32 values up to 0, and 0 below -87, with the operations of the C.

    e^x = 2^n e^r, n the integer next to x / ln 2; e^r is Cephes' polynomial for `expf` (relative error
    below 2e-7).
    """
    bounded = torch.where(x < _LOWEST, _LOWEST, x)
    shifted = bounded * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = bounded - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + term
    p = p * (r * r) + r + 1.0
    power = ((shifted.view(torch.int32) + 127) << 23).view(torch.float32)
    return p * power * (x >= _LOWEST).logical_or(x.isnan())


def _grouped(x_BNTH: Tensor, k_BKSH: Tensor) -> Tensor:
    """Heads as [B, K, G, T, H], fp32."""
    return x_BNTH.float().unflatten(1, (k_BKSH.shape[1], -1))


def _multiply_in_order(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, adding the terms of each sum in their order."""
    out = a.new_zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    for i in range(a.shape[-1]):
        out += a[..., i : i + 1] * b[..., i : i + 1, :]
    return out


def _row_sum(x: Tensor) -> Tensor:
    """The sum over the last axis: 16 lanes in order, then pairwise."""
    lanes = x.new_zeros(*x.shape[:-1], LANES)
    for piece in torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES)).split(LANES, -1):
        lanes += piece
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, -1)
        lanes = low + high
    return lanes[..., 0]

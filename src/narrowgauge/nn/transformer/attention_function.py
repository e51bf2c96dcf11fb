"""Attention with quantized operands: the exact reference, which holds the scores of some rows at a time.

    z_ts = (q_t . k_s) / sqrt(H)                       forward, with q, k, p, v in the casts of their places
    p_ts = softmax over s of z_ts                      rows sum to 1 before p is quantized
    y_t  = sum over s of p_ts v_s

    dv_s = sum over t of p_ts do_t                     backward, with do and ds in the casts of their places
    dp_ts = do_t . v_s
    ds_ts = p_ts (dp_ts - sum over s of p_ts dp_ts)    p as the softmax returned it
    dq_t = (sum over s of ds_ts k_s) / sqrt(H)         dk_s = (sum over t of ds_ts q_t) / sqrt(H)

Rounding passes gradients through unchanged, so these are the gradients of the matmuls that were computed.
Sums and the softmax are float32 (float64 for float64 tensors); the scale of a full tensor is applied to a
sum, not to its terms. The result has the dtype of q. p is quantized after it is normalized; under a scale per
row this is the same as quantizing exp(z - max z), as kernels with a running maximum do.

A kernel never holds p, and this function holds only some rows of it: `SCORES` elements at a time, in whole
heads if one fits. A scale over all of p (or ds) is computed in a first round over the pieces, which are then
recomputed; a block that spans all queries needs all rows of a head. The backward pass keeps q, k, v and
recomputes the rest, except the amax of p. Splitting into pieces changes only the order of the sums
over T.

Legend: B sequences, N query heads, K key-value heads, Z = B N matrices, Y = B K matrices, T queries, S keys,
H head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.devices import imagined
from narrowgauge.nn.gemm import Operand
from narrowgauge.nn.transformer.attention_context import AttentionContext, Part, needs_largest
from narrowgauge.second_derivative import FirstOrderFunction

SCORES = {"cpu": 2**20, "cuda": 2**25}  # elements of p that are held at a time, in float32


class _Scores:
    """The probabilities of attention, piece by piece."""

    def __init__(
        self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, context: AttentionContext
    ) -> None:
        (B, N, T, H), (_, K, S, _) = q_BNTH.shape, k_BKSH.shape
        self.context, self.groups, self.factor = context, N // K, H**-0.5
        self.of_q, self.of_k, self.of_p = (B, N, T, H), (B, K, S, H), (B, N, T, S)
        self.dtype = q_BNTH.dtype
        self.wide = torch.promote_types(q_BNTH.dtype, torch.float32)
        self.q_ZTH, self.k_YSH, self.v_YSH = (x.flatten(0, 1) for x in (q_BNTH, k_BKSH, v_BKSH))
        self.mask = mask
        self.q = self.query("q kᵀ", -1)
        self.k = self.key("q kᵀ", -1)
        self.parts = _parts(B * N, T, S, context, q_BNTH.device)
        self._held: dict[str, Tensor] = {}

    def query(self, product: str, axis: int) -> Operand:
        """The operand q of a matmul."""
        return self.context.operand(self.q_ZTH, "attention.q", product, axis, self.dtype, shape=self.of_q)

    def key(self, product: str, axis: int) -> Operand:
        """The operand k of a matmul, for each query head."""
        found = self.context.operand(self.k_YSH, "attention.k", product, axis, self.dtype, shape=self.of_k)
        return self._for_queries(found)

    def value(self, product: str, axis: int) -> Operand:
        """The operand v of a matmul, for each query head."""
        found = self.context.operand(self.v_YSH, "attention.v", product, axis, self.dtype, shape=self.of_k)
        return self._for_queries(found)

    def _for_queries(self, found: Operand) -> Operand:
        if self.groups == 1:
            return found
        return Operand(found.values.repeat_interleave(self.groups, dim=0), found.scale)

    def probabilities(self, part: Part) -> Tensor:
        """p of a part, as the softmax returns it: [Z, T, S] of the part, float32 or float64."""
        if (held := self._held.get("p")) is not None:
            return held
        z = _product(_part(self.q, part), _turned(_part(self.k, part, rows=False)), self.wide)
        z = (z * self.factor).masked_fill_(~self._visible(part), -math.inf)
        p = z.softmax(dim=-1)
        if len(self.parts) == 1:
            self._held["p"] = p
        return p

    def _visible(self, part: Part) -> Tensor:
        """Which keys the queries of a part see: bool, [Z or 1, T, S] of the part."""
        (_, N, T, S), device = self.of_p, self.q_ZTH.device
        if self.mask is not None:
            sequence_Z = torch.arange(part.matrices.start, part.matrices.stop, device=device) // N
            return self.mask[:, 0, part.rows][sequence_Z]
        t_T = torch.arange(part.rows.start, part.rows.stop, device=device)[:, None]
        return (torch.arange(S, device=device) <= t_T + (S - T))[None]

    def narrowed(
        self, x: Tensor, place: str, product: str, axis: int, part: Part, largest: Tensor | None
    ) -> Operand:
        """The operand made from a part of p or ds for a matmul."""
        shape = self.of_p
        return self.context.operand(x, place, product, axis, self.dtype, largest, part, shape)

    def largest(
        self, place: str, uses: dict[str, int], tensor: Callable[[Part], Tensor]
    ) -> dict[str, Tensor | None]:
        """The amax of p or ds for each matmul (with the axis that it contracts), if needed."""
        is_whole = len(self.parts) == 1 and not self.context.shard.groups
        needed = {p: axis for p, axis in uses.items() if needs_largest(self.context.cast(place, p))}
        if is_whole or not needed:
            return dict.fromkeys(uses)
        found: dict[str, list[Tensor]] = {product: [] for product in needed}
        local = AttentionContext(self.context.casts)
        for part in self.parts:
            x = tensor(part)
            for product, axis in needed.items():
                largest = local.largest(x, place, product, axis)
                assert largest is not None
                found[product].append(largest)
        return dict.fromkeys(uses) | {
            product: self.context.over_processes(torch.stack(each).amax()) for product, each in found.items()
        }


class _NarrowAttention(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        mask: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        scores = _Scores(q_BNTH, k_BKSH, v_BKSH, mask, context)
        v, out = scores.value("p v", -2), torch.empty_like(scores.q_ZTH)
        largest = scores.largest("attention.p", {"p v": -1}, scores.probabilities)
        for part in scores.parts:
            p = scores.narrowed(scores.probabilities(part), "attention.p", "p v", -1, part, largest["p v"])
            part.of(out).copy_(_product(p, _part(v, part, rows=False), scores.wide))
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, mask, largest["p v"])
        ctx.context = context
        return out.unflatten(0, q_BNTH.shape[:2])

    @staticmethod
    def backward(ctx: Any, dy_BNTH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNTH, k_BKSH, v_BKSH, mask, largest_p = ctx.saved_tensors
        scores = _Scores(q_BNTH, k_BKSH, v_BKSH, mask, ctx.context)
        dq_ZTH, dk_ZSH, dv_ZSH = _gradients(scores, dy_BNTH.flatten(0, 1), largest_p)
        dk_BKSH, dv_BKSH = (
            d.unflatten(0, (*k_BKSH.shape[:2], scores.groups)).sum(2).to(k_BKSH.dtype)
            for d in (dk_ZSH, dv_ZSH)
        )
        return dq_ZTH.unflatten(0, q_BNTH.shape[:2]), dk_BKSH, dv_BKSH, None, None


def _gradients(scores: _Scores, dy_ZTH: Tensor, largest_p: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq in the dtype of q, dk and dv of every query head, wide."""
    context, dtype, wide, shape = scores.context, scores.dtype, scores.wide, scores.of_q
    do_T = context.operand(dy_ZTH, "attention.do", "pᵀ do", -2, dtype, shape=shape)
    do_H = context.operand(dy_ZTH, "attention.do", "do vᵀ", -1, dtype, shape=shape)
    v_H = _turned(scores.value("do vᵀ", -1))
    k_S, q_T = scores.key("ds k", -2), scores.query("dsᵀ q", -2)

    def score_gradient(part: Part) -> Tensor:
        p = scores.probabilities(part)
        dp = _product(_part(do_H, part), _part(v_H, part, rows=False), wide)
        return p * (dp - (p * dp).sum(-1, keepdim=True))

    cast_p = context.cast("attention.p", "pᵀ do")
    if cast_p is None or cast_p.hadamard:  # else no axis changes it
        largest_p = scores.largest("attention.p", {"pᵀ do": -2}, scores.probabilities)["pᵀ do"]
    of_ds = scores.largest("attention.ds", {"ds k": -1, "dsᵀ q": -2}, score_gradient)
    dq_ZTH = torch.empty_like(scores.q_ZTH)
    (Z, _, H), S = dq_ZTH.shape, k_S.values.shape[1]
    dk_ZSH, dv_ZSH = (torch.zeros(Z, S, H, dtype=wide, device=dq_ZTH.device) for _ in range(2))
    for part in scores.parts:
        p, heads = scores.probabilities(part), Part(part.matrices, slice(None))
        ds = score_gradient(part)
        p_T = scores.narrowed(p, "attention.p", "pᵀ do", -2, part, largest_p)
        heads.of(dv_ZSH).add_(_product(_turned(p_T), _part(do_T, part), wide))
        ds_S = scores.narrowed(ds, "attention.ds", "ds k", -1, part, of_ds["ds k"])
        part.of(dq_ZTH).copy_(_product(ds_S, _part(k_S, part, rows=False), wide) * scores.factor)
        ds_T = scores.narrowed(ds, "attention.ds", "dsᵀ q", -2, part, of_ds["dsᵀ q"])
        heads.of(dk_ZSH).add_(_product(_turned(ds_T), _part(q_T, part), wide) * scores.factor)
    return dq_ZTH, dk_ZSH, dv_ZSH


def _parts(Z: int, T: int, S: int, context: AttentionContext, device: torch.device) -> list[Part]:
    """The pieces in which p is computed: some whole heads each, or some rows of one."""
    limit = SCORES.get(device.type, SCORES["cuda"])
    casts = (context.casts.get("attention.p"), context.casts.get("attention.ds"))
    along_T = [n for c in casts if c is not None for n in (*(c.block or ()), c.outer_columns) if n]
    spans_T = any(c is not None and c.block is not None and 0 in c.block for c in casts)
    align = math.lcm(*along_T, *(c.hadamard for c in casts if c is not None and c.hadamard))
    # If only the amount of memory matters, two pieces are enough.
    is_meta = device.type == "meta" and imagined(device) is None
    if spans_T or limit >= T * S or align >= T:
        heads = max(1, limit // max(T * S, 1))
        parts = [Part(slice(z, min(z + heads, Z)), slice(0, T)) for z in range(0, Z, heads)]
    else:
        rows = max(1, limit // S // align) * align
        starts = [(z, t) for z in range(min(Z, 2) if is_meta else Z) for t in range(0, T, rows)]
        parts = [Part(slice(z, z + 1), slice(t, min(t + rows, T))) for z, t in starts]
    return parts[:2] if is_meta else parts


def _product(a: Operand, b: Operand, wide: torch.dtype) -> Tensor:
    """a @ b of matrices, scales applied to the sums."""
    c = a.values.to(wide) @ b.values.to(wide)
    for scale in _scale(a, b):
        c *= scale
    return c


def _scale(a: Operand, b: Operand) -> list[Tensor]:
    scales = [s for s in (a.scale, b.scale) if s is not None]
    return [scales[0] * scales[1]] if len(scales) == 2 else scales


def _turned(a: Operand) -> Operand:
    """The same values, with rows and columns of every matrix swapped."""
    return Operand(a.values.mT, a.scale)


def _part(a: Operand, part: Part, rows: bool = True) -> Operand:
    """The matrices of a part of an operand: the part's rows, or all rows."""
    part = part if rows else Part(part.matrices, slice(None))
    return Operand(part.of(a.values), a.scale)


#: (q, k, v, mask or None, context) to y [B, N, T, H].
narrow_attention: Callable[..., Tensor] = _NarrowAttention.apply

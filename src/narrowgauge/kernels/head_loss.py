"""The head's product and the loss together, so that the logits of all tokens never exist at once.

    z_CV  = h_CD @ w_VD.T            for a chunk of C tokens, in the dtype of h
    dz_CV = gradient of the loss     over the logits, in place (`cross_entropy`)
    dh_CD = dz_CV @ w_VD
    dw_VD += dz_CV.T @ h_CD          in fp32, chunk after chunk from the first token to the last

It is for a head that is a plain product of h and of the weight in h's dtype. Losses are kept one a token and
summed at the end; losses and dh of a token are made of that token alone, so that the number of tokens in a
chunk changes no number of them (as far as the GEMM adds up one row alike, whatever rows stand beside it). dw
depends on it in the order of its sum alone.

The gradients are computed in the forward pass, while the chunk's logits are there, for a loss whose own
gradient is 1; the backward pass multiplies dh and dw, which are fp32 until then, by the real one, a scalar.
That is exact for powers of two (a mean over 2^n equal micro-batches). Otherwise dz was rounded before the
factor instead of after it: the same relative error. It would not be in fp16, whose gradients live by the loss
scale: dz of 2^-24 and less are gone before they are scaled. So there the backward pass computes the logits
again, with the scale.

    GEMMs of 2 T V D operations    fp32, bf16: 3, as without chunks      fp16: 4

Differences from a head and a loss apart, which round dh to the compute dtype, too: dw is not rounded to that
before it becomes fp32.

Bytes, Llama-3 8B (V = 128256, D = 4096, bf16, 16 x 1024 tokens), beside h, its gradient, the weight and its
fp32 gradient, which both have:

    apart              4.20e9 logits + 4.20e9 their gradient (none if it is written over them) + 1.05e9 dw in
                       bf16 before it becomes fp32 + 0.2e9 of a chunk in fp32 = 9.7e9 (5.5e9)
    together           1.05e9 logits of 4096 tokens + 0.27e9 dh in fp32 = 1.3e9

A chunk is as large as that because each of them reads and writes the fp32 sum of dw, 8 V D bytes, which has
to be little beside the 2 C V D operations of its product: at 777 TFLOP/s and 4.25 TB/s a sixth for C = 4096,
two thirds for 1024. That fixes the order of the sum, so it is no setting.

Legend: T tokens, C tokens of one chunk, D dim, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.kernels.cross_entropy import row_losses, write_gradients
from narrowgauge.kernels.dispatch import is_slow

#: Logits held at a time (1 GiB in bf16).
CHUNK_ELEMENTS = 2**29
_TILE = 128  # of a GEMM: chunks are whole tiles of tokens


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, w_VD: Tensor, y_T: Tensor, targets: int | None, has_gradients: bool
    ) -> Tensor:
        ctx.ignores, ctx.dtypes = targets is not None, (h_TD.dtype, w_VD.dtype)
        ctx.count = len(y_T) if targets is None else max(targets, 1)
        ctx.is_late = h_TD.dtype == torch.float16
        factor = None
        if has_gradients and not ctx.is_late:
            factor = torch.ones((), dtype=torch.float32, device=h_TD.device) / ctx.count
        loss_T, dh_TD, dw_VD = _walk(h_TD, w_VD, y_T, ctx.ignores, factor)
        if has_gradients:
            ctx.save_for_backward(*((h_TD, w_VD, y_T) if ctx.is_late else (dh_TD, dw_VD)))
        return loss_T.sum() / ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        h_dtype, w_dtype = ctx.dtypes
        if ctx.is_late:
            h_TD, w_VD, y_T = ctx.saved_tensors
            _, dh_TD, dw_VD = _walk(h_TD, w_VD, y_T, ctx.ignores, grad / ctx.count)
        else:
            dh_TD, dw_VD = (saved.mul_(grad) for saved in ctx.saved_tensors)
        return dh_TD.to(h_dtype), dw_VD.to(w_dtype), None, None, None


def head_loss(h_BTD: Tensor, w_VD: Tensor, y_BT: Tensor, targets: int | None = None) -> Tensor:
    """Mean cross entropy (nats per token) of the logits h @ w.T, computed in h's dtype: fp32 scalar.

    `y_BT` and `targets` are those of `cross_entropy`. The gradient of `w_VD` is summed in fp32 and rounded
    once to its dtype. There is no second derivative, and no second backward pass through a retained graph.
    """
    has_gradients = torch.is_grad_enabled() and (h_BTD.requires_grad or w_VD.requires_grad)
    loss: Tensor = _HeadLoss.apply(h_BTD.flatten(0, -2), w_VD, y_BT.flatten(), targets, has_gradients)
    return loss


def rows_of_chunk(tokens: int, vocabulary: int) -> int:
    """How many tokens a chunk has: no more than fit, chunks of about one size, in whole tiles of a GEMM."""
    most = max(_TILE, CHUNK_ELEMENTS // vocabulary // _TILE * _TILE)
    chunks = -(-tokens // most)
    each = -(-tokens // max(1, chunks))
    return max(_TILE, -(-each // _TILE) * _TILE)


def _walk(
    h_TD: Tensor, w_VD: Tensor, y_T: Tensor, ignores: bool, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses [T], dh_TD, dw_VD), all fp32; the gradients are multiplied by `factor`, or empty if None."""
    if torch.compiler.is_compiling():
        return _walk_as_one(h_TD, w_VD, y_T, ignores, factor)
    return _walk_through(h_TD, w_VD, y_T, ignores, factor)


def _walk_through(
    h_TD: Tensor, w_VD: Tensor, y_T: Tensor, ignores: bool, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    w_VD = w_VD.to(h_TD.dtype)
    T, V, rows = len(h_TD), len(w_VD), rows_of_chunk(len(h_TD), len(w_VD))
    loss_T, dh_TD, dw_VD = _results(h_TD, w_VD, factor)
    logits_CV = _rows_apart(min(rows, T), V, h_TD)
    # Without numbers one step stands for all.
    for start in range(0, min(T, rows) if h_TD.is_meta else T, rows):
        here = slice(start, start + rows)
        h_CD, y_C = h_TD[here], y_T[here]
        z_CV = logits_CV[: len(h_CD)]
        _multiply(h_CD, w_VD.T, z_CV)
        loss_C, stats_2C = row_losses(z_CV, y_C, ignores)
        loss_T[here] = loss_C
        if factor is not None:
            write_gradients(z_CV, y_C, stats_2C, factor, ignores, z_CV)
            _multiply(z_CV, w_VD, dh_TD[here])
            _multiply(z_CV.T, h_CD, dw_VD, adds=start > 0)
    if factor is not None and not T:
        dw_VD.zero_()
    return loss_T, dh_TD, dw_VD


@torch.library.custom_op("narrowgauge::head_loss", mutates_args=())
def _walk_as_one(
    h_TD: Tensor, w_VD: Tensor, y_T: Tensor, ignores: bool, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk as one operator, so that compiled graphs hold it whole and its kernels stay in it."""
    return _walk_through(h_TD, w_VD, y_T, ignores, factor)


@_walk_as_one.register_fake
def _(
    h_TD: Tensor, w_VD: Tensor, y_T: Tensor, ignores: bool, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(h_TD, w_VD, factor)


def _results(h_TD: Tensor, w_VD: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what `_walk` returns."""
    shapes = [(len(h_TD),), *([(0,), (0,)] if factor is None else [h_TD.shape, w_VD.shape])]
    loss_T, dh_TD, dw_VD = (h_TD.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return loss_T, dh_TD, dw_VD


def _rows_apart(rows: int, width: int, like: Tensor) -> Tensor:
    """Memory of (rows, width), each row of which begins at a multiple of 128 bytes.

    A vocabulary of 50257 would have GEMMs and kernels read and write single numbers.
    """
    numbers = 128 // like.element_size()
    return like.new_empty(rows, -(-width // numbers) * numbers)[:, :width]


def _multiply(a: Tensor, b: Tensor, out: Tensor, adds: bool = False) -> None:
    """out = a @ b, or out += a @ b, with one rounding to out's dtype: that of the operands, or fp32."""
    if out.dtype == torch.float32 == a.dtype:
        torch.addmm(out, a, b, beta=int(adds), out=out)
    elif out.is_meta:
        return  # nothing is made but `out`
    elif out.device.type == "cpu" and (out.dtype == torch.float32 or is_slow(a)):
        # Torch has no product of narrow operands in fp32 there.
        product = a.float() @ b.float()
        out.copy_(out + product if adds else product)
    elif out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=int(adds), out=out)
    else:
        torch.mm(a, b, out=out)

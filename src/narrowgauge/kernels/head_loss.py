"""The head's matmul fused with the loss, so that the logits of all tokens never exist at once.

    z_CV  = h_CD @ w_VD.T            for a chunk of C tokens, in the dtype of h
    dz_CV = gradient of the loss     over the logits, in place (`cross_entropy`)
    dh_CD = dz_CV @ w_VD
    dw_VD += dz_CV.T @ h_CD          in fp32, chunk after chunk from the first token to the last

The head must be a plain matmul of h and the weight in h's dtype. One loss per token is kept, and all are
summed at the end. A token's loss and dh depend on that token alone, so the chunk size changes none of them
(as far as a GEMM sums a row the same way regardless of the other rows). dw depends on it only in the order of
its sum.

The gradients are computed in the forward pass, while the chunk's logits exist, as if the gradient of the loss
were 1; the backward pass multiplies dh and dw, which are fp32 until then, by the actual one, a scalar. This
is exact for powers of two (a mean over 2^n equal micro-batches). Otherwise dz is rounded before the factor
instead of after it, with the same relative error. In fp16 the error would be larger: dz of 2^-24 and less
would be lost before the loss scale reaches them. There the backward pass recomputes the logits, with the
scale.

    GEMMs of 2 T V D FLOPs    fp32, bf16: 3, as without chunks      fp16: 4

The only difference from a separate head and loss, which also round dh to the compute dtype: dw is not rounded
to that dtype before it becomes fp32.

Bytes, Llama-3 8B (V = 128256, D = 4096, bf16, 16 x 1024 tokens), without h, its gradient, the weight and its
fp32 gradient, which both have:

    separate           4.20e9 logits + 4.20e9 their gradient (none if it is written over them) + 1.05e9 dw in
                       bf16 before it becomes fp32 + 0.2e9 of a chunk in fp32 = 9.7e9 (5.5e9)
    fused              1.05e9 logits of 4096 tokens + 0.27e9 dh in fp32 = 1.3e9

A chunk is that large because each one reads and writes the fp32 sum of dw, 8 V D bytes, which must be cheap
compared with the 2 C V D FLOPs of its GEMM: at 777 TFLOP/s and 4.25 TB/s a sixth for C = 4096, two thirds for
1024. The size determines the order of the sum, so it is not a setting.

Legend: T tokens, C tokens of one chunk, D dim, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.cross_entropy import objective_of, row_losses, with_z_loss
from narrowgauge.kernels.dispatch import is_slow, sums_in_fp32
from narrowgauge.kernels.product import aligned_rows
from narrowgauge.system.devices import is_shape_only
from narrowgauge.system.second_derivative import FirstOrderFunction

Add = Callable[[Tensor, Tensor], bool]

#: Logits held at a time (1 GiB in bf16).
CHUNK_ELEMENTS = 2**29
_TILE = 128  # tokens of a GEMM tile; chunks are full tiles


class _HeadLoss(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        w_VD: Tensor,
        y_T: Tensor,
        targets: int | None,
        has_gradients: bool,
        z_loss: float,
        add: Add | None,
    ) -> Tensor:
        ctx.add = add
        ctx.ignores, ctx.dtypes, ctx.z_loss = targets is not None, (h_TD.dtype, w_VD.dtype), z_loss
        ctx.count = len(y_T) if targets is None else max(targets, 1)
        ctx.is_late = h_TD.dtype == torch.float16
        factor = None
        if has_gradients and not ctx.is_late:
            factor = torch.ones((), dtype=torch.float32, device=h_TD.device) / ctx.count
        loss_T, squares_T, dh_TD, dw_VD = _compute(h_TD, w_VD, y_T, ctx.ignores, factor, z_loss)
        if has_gradients:
            ctx.save_for_backward(*((h_TD, w_VD, y_T) if ctx.is_late else (dh_TD, dw_VD)))
        return with_z_loss(loss_T.sum() / ctx.count, squares_T if z_loss else None, z_loss, ctx.count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (h_dtype, w_dtype), grad = ctx.dtypes, objective_of(grad)
        if ctx.is_late:
            h_TD, w_VD, y_T = ctx.saved_tensors
            factor = grad / ctx.count
            _, _, dh_TD, dw_VD = _compute(h_TD, w_VD, y_T, ctx.ignores, factor, ctx.z_loss)
        else:
            dh_TD, dw_VD = ctx.saved_tensors
            dh_TD = dh_TD.mul_(grad)
            if ctx.add is not None and ctx.add(dw_VD, grad):
                return dh_TD.to(h_dtype), None, None, None, None, None, None
            dw_VD = dw_VD.mul_(grad)
        return dh_TD.to(h_dtype), dw_VD.to(w_dtype), None, None, None, None, None


def head_loss(
    h: Tensor,
    w_VD: Tensor,
    y: Tensor,
    targets: int | None = None,
    z_loss: float = 0.0,
    add: Add | None = None,
) -> Tensor:
    """Mean cross entropy (nats per token) of the logits h @ w.T, as an fp32 scalar.

    With a `z_loss` it is fp32 [3], as in `cross_entropy`.

    The gradient of `w_VD` is summed in fp32 and rounded once to its dtype. Neither a second derivative nor a
    second backward pass through a retained graph is supported.

    Args:
        h: [..., D], the head's input; the logits are computed in its dtype.
        w_VD: The weight of the head.
        y: [...], token ids, as for `cross_entropy`.
        targets: As for `cross_entropy`.
        z_loss: As for `cross_entropy`.
        add: Adds the gradient of the weight, fp32, times a 0-dim tensor, to the pending gradient; returns
            False to leave it to autograd.
    """
    has_gradients = torch.is_grad_enabled() and (h.requires_grad or w_VD.requires_grad)
    loss: Tensor = _HeadLoss.apply(h.flatten(0, -2), w_VD, y.flatten(), targets, has_gradients, z_loss, add)
    return loss


def rows_of_chunk(tokens: int, vocabulary: int) -> int:
    """The tokens per chunk: as many as fit, similar in all chunks, in full GEMM tiles."""
    most = max(_TILE, CHUNK_ELEMENTS // vocabulary // _TILE * _TILE)
    chunks = -(-tokens // most)
    rows = -(-tokens // max(1, chunks))
    return max(_TILE, -(-rows // _TILE) * _TILE)


def _in_chunks(
    h_TD: Tensor, w_VD: Tensor, y_T: Tensor, ignores: bool, factor: Tensor | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses [T], squares of `row_losses` [T] or empty, dh_TD, dw_VD), all fp32.

    The gradients are multiplied by `factor`, or empty if it is None.
    """
    w_VD = w_VD.to(h_TD.dtype)
    T, V, rows = len(h_TD), len(w_VD), rows_of_chunk(len(h_TD), len(w_VD))
    loss_T, squares_T, dh_TD, dw_VD = _results(h_TD, w_VD, y_T, ignores, factor, z_loss)
    logits_CV = aligned_rows(min(rows, T), V, h_TD)
    # On the meta device one chunk represents all.
    for start in range(0, min(T, rows) if is_shape_only(h_TD) else T, rows):
        chunk = slice(start, start + rows)
        h_CD, y_C = h_TD[chunk], y_T[chunk]
        z_CV = logits_CV[: len(h_CD)]
        _multiply(h_CD, w_VD.T, z_CV)
        loss_T[chunk], squares_C, _ = row_losses(z_CV, y_C, ignores, z_loss, factor)
        if squares_C is not None:
            squares_T[chunk] = squares_C
        if factor is not None:
            _multiply(z_CV, w_VD, dh_TD[chunk])
            _multiply(z_CV.T, h_CD, dw_VD, adds=start > 0)
    if factor is not None and not T:
        dw_VD.zero_()
    return loss_T, squares_T, dh_TD, dw_VD


def _results(
    h_TD: Tensor, w_VD: Tensor, y_T: Tensor, ignores: bool, factor: Tensor | None, z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of `_in_chunks`."""
    T = len(h_TD)
    shapes = [(T,), (T if z_loss else 0,)] + ([(0,), (0,)] if factor is None else [h_TD.shape, w_VD.shape])
    loss_T, squares_T, dh_TD, dw_VD = (h_TD.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return loss_T, squares_T, dh_TD, dw_VD


# One operator, so that compiled graphs contain it whole, with its kernels.
_operator = torch.library.custom_op("narrowgauge::head_loss", _in_chunks, mutates_args=())
_operator.register_fake(_results)


def _compute(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_in_chunks`, traced as one operator."""
    return (_operator if torch.compiler.is_compiling() else _in_chunks)(*inputs)


def _multiply(a: Tensor, b: Tensor, out: Tensor, adds: bool = False) -> None:
    """out = a @ b, or out += a @ b, with one rounding to out's dtype: that of the operands, or fp32."""
    if out.dtype == torch.float32 == a.dtype:
        torch.addmm(out, a, b, beta=int(adds), out=out)
    elif is_shape_only(out):
        return  # a matmul would allocate only `out`
    elif is_slow(a) or (out.dtype == torch.float32 and not sums_in_fp32(out.device)):
        product = a.float() @ b.float()
        out.copy_(out + product if adds else product)
    elif out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=int(adds), out=out)
    else:
        torch.mm(a, b, out=out)

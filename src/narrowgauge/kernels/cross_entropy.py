"""Mean cross entropy in fp32, without ever holding an fp32 copy of all logits.

    loss   = mean over tokens of  log(sum_v exp(z_v)) - z_y
    dz_v   = (softmax(z)_v - [v = y]) / tokens

The z-loss is a separate term that keeps the logits from drifting: cross entropy does not see a constant added
to all of them (PaLM, arXiv 2204.02311, section 5; OLMo 2, arXiv 2501.00656).

    z-loss = c * mean over tokens of  s^2,    s = log(sum_v exp(z_v))
    dz_v   = c * 2 s softmax(z)_v / tokens        both: (softmax(z)_v (1 + 2 c s) - [v = y]) / tokens

With a vocabulary of 50 000 to 130 000 the logits are the largest tensor of a small model's step. Torch's
cross entropy of `logits.float()` holds them three times: as the head wrote them, in fp32, and as
log-probabilities. Bytes moved per bf16 logit, forward and backward:

    reference    14 + 28    each torch operation reads and writes, in chunks: only one chunk at a time is in
                            fp32, also in the backward pass, where it is recomputed (elementwise, no GEMM)
    kernel        2 +  4    the largest logit and the sum of exponentials come from one read (online softmax,
                            Milakov and Gimelshein, arXiv 1805.02867); 8 bytes per token are kept

The head itself runs once on all tokens, so that any replacement sees one tensor per step, not one per chunk;
`head_loss` is for heads that are plain matmuls.

`overwrite` writes the gradient over the logits, so that a second tensor of their size never exists. The
caller must know that nothing else reads the logits any more. Autograd then refuses a second backward pass
through a retained graph, because it sees that the logits have changed.

Where documents are separated, some targets are IGNORED: they contribute nothing, and the mean is over the
others. Any other id outside the vocabulary is an error in the reference. A kernel cannot raise without a
sync: it reads nothing there, and the token's loss and gradients become NaN, which the guard rejects.

Legend: T tokens (batch and sequence flattened), C tokens of one chunk, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.system.devices import is_shape_only
from narrowgauge.system.second_derivative import FirstOrderFunction

#: fp32 logits held at a time (64 MiB). It determines the order of summation, so it is not a setting.
CHUNK_ELEMENTS = 2**24

#: The target that contributes no loss, in place of a token id; the same value as torch's.
IGNORED = -100


class _CrossEntropy(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, y_T: Tensor, targets: int | None, overwrite: bool, z_loss: float
    ) -> Tensor:
        ignores, stats_2T, squares_T = targets is not None, None, None
        if use_kernels(logits_TV):
            loss_T, squares_T, stats_2T = row_losses(logits_TV, y_T, ignores, z_loss)
            total = loss_T.sum()
        else:
            total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
            for z_CV, y_C in _chunks(logits_TV, y_T):
                total += _losses(z_CV, y_C, ignores).sum()
            if z_loss:
                squares_T = _squares(logits_TV, y_T, None, ignores)
        ctx.save_for_backward(logits_TV, y_T, stats_2T)
        ctx.ignores, ctx.overwrite, ctx.z_loss = ignores, overwrite, z_loss
        ctx.count = len(y_T) if targets is None else max(targets, 1)
        return with_z_loss(total / ctx.count, squares_T, z_loss, ctx.count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, y_T, stats_2T = ctx.saved_tensors
        grad_TV = logits_TV.detach() if ctx.overwrite else torch.empty_like(logits_TV)
        factor = objective_of(grad) / ctx.count
        write_gradients(logits_TV, y_T, stats_2T, factor, ctx.ignores, grad_TV, ctx.z_loss)
        return grad_TV, None, None, None, None


def cross_entropy(
    logits: Tensor, y: Tensor, targets: int | None = None, overwrite: bool = False, z_loss: float = 0.0
) -> Tensor:
    """Mean cross entropy in nats per token, as an fp32 scalar.

    With a `z_loss` it is fp32 [3] instead: the objective, which is the sum of the other two and the only one
    with a gradient; the cross entropy; the z-loss.

    Args:
        logits: [..., V] in any dtype.
        y: [...], token ids in [0, V). Any other id except IGNORED is an error (in a kernel: NaN).
        targets: Allows IGNORED among the ids: the number of remaining ids, over which the mean is taken.
        overwrite: Lets the backward pass write the gradient over the logits, if nothing else needs them.
        z_loss: The coefficient c; 0 for none.
    """
    overwrite = overwrite and not torch.compiler.is_compiling()  # the compiler plans memory itself
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), y.flatten(), targets, overwrite, z_loss)
    return loss


def with_z_loss(loss: Tensor, squares_T: Tensor | None, z_loss: float, count: int) -> Tensor:
    """The result of `cross_entropy`, from the mean loss and the squares of `row_losses`."""
    if squares_T is None:
        return loss
    terms_2 = torch.stack([loss, z_loss * squares_T.sum() / count])
    return torch.cat([terms_2.sum()[None], terms_2])


def objective_of(loss: Tensor) -> Tensor:
    """The training objective, 0-dim: the loss itself, or the first of the three with a z-loss."""
    return loss[0] if loss.ndim else loss


def row_losses(
    z_TV: Tensor, y_T: Tensor, ignores: bool, z_loss: float = 0.0, factor: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of each token, fp32 [T]; with a `factor` the gradients are written over the logits.

    They are those of `write_gradients`; a kernel does both in one launch. `ignores` allows IGNORED among the
    ids.

    Returns:
        The losses; with a z-loss the squared log-sum-exp of each token, fp32 [T], 0 for an IGNORED one; and
        the statistics that a kernel keeps for `write_gradients`, fp32 [2, T].
    """
    stats_2T = None
    if use_kernels(z_TV):
        from narrowgauge.kernels.triton import cross_entropy as on_gpu

        loss_T, stats_2T = on_gpu.losses(z_TV, y_T, IGNORED if ignores else None, factor, z_loss)
    else:
        loss_T = z_TV.new_empty(len(z_TV), dtype=torch.float32)
        for z_CV, y_C, loss_C in _chunks(z_TV, y_T, loss_T):
            loss_C.copy_(_losses(z_CV, y_C, ignores))
    squares_T = _squares(z_TV, y_T, stats_2T, ignores) if z_loss else None
    if factor is not None and stats_2T is None:
        write_gradients(z_TV, y_T, None, factor, ignores, z_TV, z_loss)
    elif factor is not None:
        torch.autograd.graph.increment_version(z_TV)  # autograd does not see a kernel's writes
    return loss_T, squares_T, stats_2T


def write_gradients(
    z_TV: Tensor,
    y_T: Tensor,
    stats_2T: Tensor | None,
    factor: Tensor,
    ignores: bool,
    out_TV: Tensor,
    z_loss: float = 0.0,
) -> None:
    """Write (softmax(z) (1 + 2 c s) - [v = y]) * factor, rounded once, to `out_TV`, which may be `z_TV`.

    `stats_2T` comes from `row_losses`; `factor` is a 0-dim fp32 tensor; c is `z_loss`.
    """
    if stats_2T is not None:
        from narrowgauge.kernels.triton import cross_entropy as on_gpu

        on_gpu.write_gradients(z_TV, y_T, stats_2T, factor, IGNORED if ignores else None, out_TV, z_loss)
        torch.autograd.graph.increment_version(out_TV)  # autograd does not see a kernel's writes
        return
    for z_CV, y_C, out_CV in _chunks(z_TV, y_T, out_TV):
        p_CV = z_CV.float().softmax(dim=-1)
        if z_loss:
            p_CV.mul_(1 + 2 * z_loss * z_CV.float().logsumexp(dim=-1, keepdim=True))
        index_C1, ignored_C1 = _split(y_C, ignores)
        p_CV.scatter_(1, index_C1, p_CV.gather(1, index_C1) - 1)
        p_CV.mul_(factor)
        out_CV.copy_(p_CV if ignored_C1 is None else p_CV.masked_fill_(ignored_C1, 0))
        del p_CV  # before the next chunk's


def _losses(z_CV: Tensor, y_C: Tensor, ignores: bool) -> Tensor:
    """The losses of one chunk."""
    index_C1, ignored_C1 = _split(y_C, ignores)
    log_p_C1 = z_CV.float().log_softmax(dim=-1).gather(1, index_C1)
    return -(log_p_C1 if ignored_C1 is None else log_p_C1.masked_fill(ignored_C1, 0))[:, 0]


def _squares(z_TV: Tensor, y_T: Tensor, stats_2T: Tensor | None, ignores: bool) -> Tensor:
    """The squares of `row_losses`."""
    if stats_2T is not None:
        log_T = stats_2T[0] + stats_2T[1].log()
    else:
        log_T = z_TV.new_empty(len(z_TV), dtype=torch.float32)
        for z_CV, log_C in _chunks(z_TV, log_T):
            log_C.copy_(z_CV.float().logsumexp(dim=-1))
    squares_T = log_T.square()
    return squares_T.masked_fill(y_T == IGNORED, 0) if ignores else squares_T


def _split(y_C: Tensor, ignores: bool) -> tuple[Tensor, Tensor | None]:
    """Ids that can be looked up, and whether each stands for IGNORED, if any may; both [C, 1]."""
    if not ignores:
        return y_C[:, None], None
    ignored_C = y_C == IGNORED
    return y_C.masked_fill(ignored_C, 0)[:, None], ignored_C[:, None]


def _chunks(logits_TV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The chunks of all tensors together, C tokens each; on the meta device one chunk represents all."""
    size = max(1, CHUNK_ELEMENTS // logits_TV.shape[1])
    if is_shape_only(logits_TV):
        return iter([tuple(x[:size] for x in (logits_TV, *others))])
    return zip(*(torch.split(x, size) for x in (logits_TV, *others)), strict=True)

"""Mean cross entropy in fp32, without ever holding an fp32 copy of all logits.

    loss   = mean over tokens of  log(sum_v exp(z_v)) - z_y
    dz_v   = (softmax(z)_v - [v = y]) / tokens

With a vocabulary of 50 000 to 130 000 the logits are the largest tensor of a small model's step. Autograd's
own cross entropy of `logits.float()` holds them three times: as they left the head, in fp32, and as
log-probabilities. Here the logits are walked through in chunks; only one chunk at a time is in fp32, in the
backward pass as well, where it is computed again (an elementwise cost, no GEMM). The head itself runs once on
all tokens, so that whatever replaces it sees one tensor per step, not one per chunk.

Where documents are kept apart some targets are IGNORED: they add nothing, and the mean is over the others.

Legend: T tokens (batch and sequence flattened), C tokens of one chunk, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: fp32 logits held at a time (64 MiB). It fixes the order of summation, so it is no setting.
CHUNK_ELEMENTS = 2**24

#: In place of a token id: the target that no loss is taken from; torch's own number for it.
IGNORED = -100


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, y_T: Tensor, targets: int | None) -> Tensor:
        ctx.save_for_backward(logits_TV, y_T)
        ctx.targets = targets
        total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
        for z_CV, y_C in _chunks(logits_TV, y_T):
            if targets is None:
                total -= z_CV.float().log_softmax(dim=-1).gather(1, y_C[:, None]).sum()
            else:
                index_C1, ignored_C1 = _split(y_C)
                log_p_C1 = z_CV.float().log_softmax(dim=-1).gather(1, index_C1)
                total -= log_p_C1.masked_fill(ignored_C1, 0).sum()
        return total / (len(y_T) if targets is None else max(targets, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, y_T = ctx.saved_tensors
        targets = ctx.targets
        grad_TV = torch.empty_like(logits_TV)
        for z_CV, y_C, out_CV in _chunks(logits_TV, y_T, grad_TV):
            p_CV = z_CV.float().softmax(dim=-1)
            index_C1, ignored_C1 = (y_C[:, None], None) if targets is None else _split(y_C)
            p_CV.scatter_(1, index_C1, p_CV.gather(1, index_C1) - 1)
            p_CV.mul_(grad / (len(y_T) if targets is None else max(targets, 1)))
            out_CV.copy_(p_CV if ignored_C1 is None else p_CV.masked_fill_(ignored_C1, 0))
            del p_CV  # before the next chunk's
        return grad_TV, None, None


def cross_entropy(logits_BTV: Tensor, y_BT: Tensor, targets: int | None = None) -> Tensor:
    """Mean cross entropy (nats per token) of logits in any dtype against token ids in [0, V): fp32 scalar.

    `targets` allows IGNORED among the ids, and says how many are not; the mean is over those. Any other id
    outside the vocabulary is an error, never ignored.
    """
    loss: Tensor = _CrossEntropy.apply(logits_BTV.flatten(0, -2), y_BT.flatten(), targets)
    return loss


def _split(y_C: Tensor) -> tuple[Tensor, Tensor]:
    """Ids that can be looked up, and which of them stand for IGNORED; both [C, 1]."""
    ignored_C = y_C == IGNORED
    return y_C.masked_fill(ignored_C, 0)[:, None], ignored_C[:, None]


def _chunks(logits_TV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walks through all tensors at once, C tokens at a time; without numbers one step stands for all."""
    size = max(1, CHUNK_ELEMENTS // logits_TV.shape[1])
    if logits_TV.is_meta:
        return iter([tuple(x[:size] for x in (logits_TV, *others))])
    return zip(*(torch.split(x, size) for x in (logits_TV, *others)), strict=True)

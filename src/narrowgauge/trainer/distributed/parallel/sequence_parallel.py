"""Collectives between processes that compute a sequence together, forward and backward.

    all_gather_tokens       local tokens -> all tokens               backward: reduce-scatter
    reduce_scatter_tokens   partial sums for all tokens -> the sum   backward: all-gather
                            for the local tokens
    all_to_all_heads        local tokens of all heads -> all tokens of local heads     backward: the inverse
    all_to_all_tokens       the inverse

The first two are sequence parallelism (arXiv 2205.05198), the last two the all-to-all of DeepSpeed-Ulysses
(arXiv 2309.14509): one process computes each head's attention in full, exactly as without parallelism.

Legend: B sequences, T tokens, t = T / processes, D the model's width, N heads, n = N / processes, H head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.system.collectives import comm_tag
from narrowgauge.system.second_derivative import FirstOrderFunction
from narrowgauge.system.torch_compat import all_gather_single, reduce_scatter_single

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class _Exchange(FirstOrderFunction):
    """A collective of one tensor, and another one for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Collective, back: Collective, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(dy, ctx.group), None, None, None


def all_gather_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, D] of each process -> [B, T, D], in the order of their ranks."""
    return _Exchange.apply(x_BTD, _all_gather, _reduce_scatter, group)


def reduce_scatter_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, D] of each process -> [B, t, D], the sum over processes for this one's tokens."""
    return _Exchange.apply(x_BTD, _reduce_scatter, _all_gather, group)


def all_to_all_heads(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, N, H] -> [B, T, n, H]."""
    return _Exchange.apply(x_BTNH, _heads, _tokens, group)


def all_to_all_tokens(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, n, H] -> [B, t, N, H]."""
    return _Exchange.apply(x_BTNH, _tokens, _heads, group)


def _heads(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _all_to_all(x_BTNH, 2, 1, group)


def _tokens(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _all_to_all(x_BTNH, 1, 2, group)


def _all_gather(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = x_TBD.new_empty(group.size() * x_TBD.shape[0], *x_TBD.shape[1:])
    with comm_tag("activations"):
        all_gather_single(out_TBD, x_TBD, group)
    return out_TBD.transpose(0, 1).contiguous()


def _reduce_scatter(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = x_TBD.new_empty(x_TBD.shape[0] // group.size(), *x_TBD.shape[1:])
    with comm_tag("activations"):
        reduce_scatter_single(out_TBD, x_TBD, group=group)
    return out_TBD.transpose(0, 1).contiguous()


def _all_to_all(x: torch.Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Divide dimension `scatter` over the processes, and concatenate what they send along `gather`."""
    sent = torch.stack(x.chunk(group.size(), scatter))
    received = torch.empty_like(sent)
    with comm_tag("activations"):
        dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gather)

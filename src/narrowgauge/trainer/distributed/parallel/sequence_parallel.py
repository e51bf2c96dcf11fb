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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.system.collectives import all_gather_rows, comm_tag, reduce_scatter_rows
from narrowgauge.system.second_derivative import FirstOrderFunction

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def exchange(x: torch.Tensor, there: Collective, back: Collective, group: dist.ProcessGroup) -> torch.Tensor:
    """The result of a collective, whose gradient takes another one back."""
    y: torch.Tensor = _Exchange.apply(x, there, back, group)
    return y


class _Exchange(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Collective, back: Collective, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back, ctx.group = back, group
        with comm_tag("activations"):
            return there(x, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with comm_tag("activations"):
            return ctx.back(dy, ctx.group), None, None, None


def all_gather_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, D] of each process -> [B, T, D], in the order of their ranks."""
    return exchange(x_BTD, _all_gather, _reduce_scatter, group)


def reduce_scatter_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, D] of each process -> [B, t, D], the sum over processes for this one's tokens."""
    return exchange(x_BTD, _reduce_scatter, _all_gather, group)


def all_to_all_heads(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, N, H] -> [B, T, n, H]."""
    return exchange(x_BTNH, partial(_all_to_all, 2, 1), partial(_all_to_all, 1, 2), group)


def all_to_all_tokens(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, n, H] -> [B, t, N, H]."""
    return exchange(x_BTNH, partial(_all_to_all, 1, 2), partial(_all_to_all, 2, 1), group)


def _all_gather(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = all_gather_rows(x_TBD.flatten(), group).view(-1, *x_TBD.shape[1:])
    return out_TBD.transpose(0, 1).contiguous()


def _reduce_scatter(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = reduce_scatter_rows(x_TBD.view(group.size(), -1), group).view(-1, *x_TBD.shape[1:])
    return out_TBD.transpose(0, 1).contiguous()


def _all_to_all(scatter: int, gather: int, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Divide dimension `scatter` over the processes, and concatenate what they send along `gather`."""
    sent = torch.stack(x.chunk(group.size(), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gather)

"""What travels between processes that compute a sequence together, forward and back.

    gather_tokens   my tokens -> all tokens              backward: a sum over processes, and my tokens of it
    sum_tokens      a sum that lacks the others' terms   backward: my tokens' gradient -> that of all tokens
                    -> the sum, of my tokens
    to_heads        my tokens of all heads -> all tokens of my heads       backward: the way back
    to_tokens       the inverse

The first two are sequence parallelism (arXiv 2205.05198), the last two the all-to-all of DeepSpeed-Ulysses
(arXiv 2309.14509): each head's attention is computed whole by one process, exactly as it is alone.
"""

from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.quantization.purpose import comm_tag

# Torch 2.13 gave them new names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, dy_BTD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(dy_BTD, ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, dy_BTD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(dy_BTD, ctx.group), None


class _AllToAll(torch.autograd.Function):
    """Cut dimension `cut` into as many pieces as there are processes, and put those received along `put`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: int, put: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.way = cut, put, group
        return _all_to_all(x, cut, put, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cut, put, group = ctx.way
        return _all_to_all(dy, put, cut, group), None, None, None


def all_gather_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, D] of each process -> [B, T, D], T = t x processes, in the order of their ranks."""
    return _AllGatherTokens.apply(x_BTD, group)


def reduce_scatter_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all processes' [B, T, D], of which each gets its own T / processes tokens."""
    return _ReduceScatterTokens.apply(x_BTD, group)


def all_to_all_heads(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, N, H] -> [B, T, n, H], n = N / processes."""
    return _AllToAll.apply(x_BTNH, 2, 1, group)


def all_to_all_tokens(x_BTNH: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, n, H] -> [B, t, N, H], t = T / processes."""
    return _AllToAll.apply(x_BTNH, 1, 2, group)


def _gathered(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = x_TBD.new_empty(group.size() * x_TBD.shape[0], *x_TBD.shape[1:])
    with comm_tag("activations"):
        _all_gather(out_TBD, x_TBD, group)
    return out_TBD.transpose(0, 1).contiguous()


def _summed(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = x_TBD.new_empty(x_TBD.shape[0] // group.size(), *x_TBD.shape[1:])
    with comm_tag("activations"):
        _reduce_scatter(out_TBD, x_TBD, group=group)
    return out_TBD.transpose(0, 1).contiguous()


def _all_to_all(x: torch.Tensor, cut: int, put: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = torch.stack(x.chunk(group.size(), cut))
    received = torch.empty_like(sent)
    with comm_tag("activations"):
        dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), put)

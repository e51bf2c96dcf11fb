"""Prepares a tensor for its blocks: the transforms of its cast, and the channels kept in another cast.

`prepare` applies the transforms of a cast in turn; `Prepared.restored` adds to an operand what they removed.

    center      x = mean + rest         operand  Q(rest) + mean: the residual has a smaller range than x
    hadamard    x H                     (`stages.hadamard`)
    outliers    x = clamp(x) + rest     operand  Q(clamp(x)) + rest (`stages.clamp`)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from narrowgauge.collectives import all_reduce_sum
from narrowgauge.errors import UserError
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.keys import Consumer
from narrowgauge.quantization.passes import in_c
from narrowgauge.quantization.sharding.shard import TensorShard
from narrowgauge.quantization.stages.channels import largest_channels
from narrowgauge.quantization.stages.clamp import quantile_ranks, ranked
from narrowgauge.quantization.stages.hadamard import hadamard

Narrow = Callable[[torch.Tensor, str, QuantContext], torch.Tensor]


class Prepared(NamedTuple):
    """A tensor after the transforms of its cast.

    Attributes:
        x: The tensor that is quantized.
        mean: The mean that was subtracted, float32, transformed like x; None if none was.
        unclamped: x before its outliers were clamped; None if they were not.
    """

    x: torch.Tensor
    mean: torch.Tensor | None = None
    unclamped: torch.Tensor | None = None

    def restored(self, operand: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Add back to a float32 operand what was removed, in place."""
        if self.mean is not None:
            operand.add_(self.mean)
        # The clamped remainder is added back in float32, because a difference of bf16 values is not exact.
        if cast.compensate and self.unclamped is not None:
            operand.add_(self.unclamped.to(torch.float32, copy=True).sub_(self.x))
        return operand


def prepare(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext, narrow: Narrow) -> Prepared:
    """Apply the transforms of a cast to a tensor.

    Args:
        x: The tensor.
        cast: The cast.
        axis: The axis that a GEMM contracts.
        context: The context of the cast.
        narrow: Quantizes a row in a named cast under a context, and returns its values.

    Raises:
        UserError: The cast has a key that nothing computes.
    """
    if left := cast.lacking[Consumer.TORCH]:
        raise UserError(f"cast {cast.name!r}: nothing computes {', '.join(left)}; remove the key")
    prepared = Prepared(x)
    if cast.center:
        prepared = _without_mean(prepared, cast, context, narrow)
    if cast.hadamard:
        prepared = _transformed(prepared, cast, axis, context)
    if cast.outliers or cast.compensate:
        prepared = _clamped(prepared, cast, context)
    return prepared


def _without_mean(prepared: Prepared, cast: Cast, context: QuantContext, narrow: Narrow) -> Prepared:
    """Subtract the mean over tokens, in x's dtype; `center_cast` rounds what is added back."""
    x = prepared.x
    mean = context.token_mean(x, in_c.token_sums(x)).float()
    rest = x - mean  # in float32
    if cast.center_cast:
        row = QuantContext(shard=None if context.shard is None else context.shard.row())
        mean = narrow(mean.flatten(0, -2), cast.center_cast, row).view([1] * (x.ndim - 1) + [-1])
    return Prepared(rest, mean)


def _transformed(prepared: Prepared, cast: Cast, axis: int, context: QuantContext) -> Prepared:
    """Transform the tensor and its mean, so that their sum is the transformed tensor."""
    x, mean = prepared.x, prepared.mean
    of_mean = None if mean is None else transformed(mean.expand_as(x), cast, axis, context)
    return Prepared(transformed(x, cast, axis, context), of_mean)


def _clamped(prepared: Prepared, cast: Cast, context: QuantContext) -> Prepared:
    """Clamp the outliers."""
    x, quantile = prepared.x, cast.outliers
    return prepared._replace(x=clamp_outliers(x, quantile, context) if quantile else x, unclamped=x)


def transformed(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> torch.Tensor:
    """The tensor after the cast's Hadamard transform, if it has one."""
    if not cast.hadamard:
        return x
    context.require_groups(cast, axis)
    return hadamard(x, cast.hadamard, axis, context.signs_of(cast))


def clamp_outliers(x: torch.Tensor, quantile: float, context: QuantContext = DEFAULT_CONTEXT) -> torch.Tensor:
    """Clamp a tensor to its quantiles 1 - `quantile` and `quantile`.

    Both are elements of the tensor, not interpolated. For a global tensor they are found among all its
    elements, which are gathered on every process that holds some.
    """
    if context.limits is not None:
        return x.clamp(*context.limits)
    elements = context.global_elements(x.detach())
    if not elements.numel():
        return x
    low, high = ranked(elements, *quantile_ranks(elements.numel(), quantile))
    return x.clamp(low, high)


def squared_norms(x: torch.Tensor, shard: TensorShard | None = None) -> torch.Tensor:
    """The sum of squares of each channel (last dimension) of the global tensor: this process's part, float64.

    The order of a float64 sum over processes almost never decides between two channels. A non-finite channel
    counts as zero: it already invalidates its own blocks.
    """
    sums = x.detach().double().square().flatten(0, -2).sum(0)
    sums = torch.where(sums.isfinite(), sums, 0.0)
    if shard is None or not shard.axes[-1].groups:
        return sums
    columns = shard.axes[-1]
    return sums.new_zeros(columns.size).index_copy(0, columns.global_indices.to(x.device), sums)


def kept_channels(x: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
    """Which channels of a local tensor are kept (bool): the given ones, else its global tensor's."""
    if context.channels is not None:
        return context.channels
    shard = context.shard
    norms = all_reduce_sum(squared_norms(x, shard), [] if shard is None else shard.groups)
    return local_channels(largest_channels(norms, cast.keep_channels), shard)


def local_channels(channels: torch.Tensor, shard: TensorShard | None) -> torch.Tensor:
    """The local part of a vector over all channels."""
    if shard is None or not shard.axes[-1].groups:
        return channels
    return channels[shard.axes[-1].global_indices.to(channels.device)]

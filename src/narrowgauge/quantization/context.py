"""The record of all that quantization depends on, except the tensor and its cast.

    random   the bits of stochastic rounding
    signs    the diagonal of a Hadamard transform whose signs are drawn anew in each step
    scale    an encoding scale that is known beforehand, in place of the one of the tensor at hand
    held     the largest magnitude of the tensor some steps ago, in place of its own
    seen     a largest magnitude of several tensors, which that of the tensor raises
    channels the channels that are kept in another cast, in place of its own choice
    shard    the position of a local tensor in a global one that several processes hold together
    amax     the largest magnitude of the tensor, where the kernel that wrote it has found it
    limits   the quantiles that outliers are clamped to, where a kernel has found them

Most tensors need none of them (`DEFAULT_CONTEXT`). Blocks, scales and random bits are laid on the global
tensor, so that sharding never changes a number; every question of quantization about it is a method.
"""

from dataclasses import dataclass, replace

import torch

from narrowgauge.collectives import all_reduce_max, all_reduce_sum
from narrowgauge.errors import UserError
from narrowgauge.formats import Randomness, RandomStream
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.sharding.shard import TensorShard


@dataclass(frozen=True, slots=True, eq=False)
class QuantContext:
    """The circumstances under which a tensor is quantized.

    Attributes:
        random: The random bits of stochastic rounding: a `RandomStream`, a `torch.Generator`, numbers in
            [0, 1) in the shape of the tensor, or None for torch's default generator.
        signs: One +1 or -1 for each element of a Hadamard group; for casts that say `signs = "random"`.
        scale: A 0-dim float32 factor of the full tensor before rounding (delayed scaling, scales that
            devices share). None takes it from the tensor.
        held: 0-dim float32, the largest magnitude of the tensor in place of its own, under a tensor scale
            that is held for some steps; 0 or None takes its own.
        seen: 0-dim float32, which `kernels.quantize` and `kernels.emulate` raise to the largest magnitude of
            the tensor, if that is finite; or None.
        channels: bool, for each channel of the local tensor whether the cast keeps it apart; None takes
            those of the tensor's own largest norms.
        shard: The position of the tensor in a global one. All processes that hold it quantize at one time.
        amax: 0-dim float32, max |x| of the local tensor, if the kernel that wrote it has found it; `kernels`
            then need not read the tensor for it.
        limits: The two numbers that `outliers.clamp_outliers` clamps to, 0-dim; None finds them.
    """

    random: Randomness = None
    signs: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shard: TensorShard | None = None
    held: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    channels: torch.Tensor | None = None
    limits: tuple[torch.Tensor, torch.Tensor] | None = None
    amax: torch.Tensor | None = None

    def local(self) -> "QuantContext":
        """The same context for the local tensor by itself: other processes are not asked."""
        return replace(self, shard=None)

    def drawn_for(self, x: torch.Tensor, cast: Cast) -> "QuantContext":
        """The same context, its random numbers drawn if a cast needs them more than once."""
        is_once = not (cast.choice.candidates or cast.choice.elements or cast.scales.correction)
        if is_once or cast.rounding.mode != "stochastic":
            return self
        if isinstance(self.random, RandomStream | torch.Tensor):
            return self
        return replace(
            self, random=torch.rand(x.shape, dtype=torch.float32, generator=self.random, device=x.device)
        )

    def signs_of(self, cast: Cast) -> torch.Tensor | tuple[int, ...]:
        """The signs of a cast's transform; () stands for those that belong to its size.

        Raises:
            UserError: The cast takes random signs, and the context has none.
        """
        if self.signs is not None:
            return self.signs
        if isinstance(cast.hadamard.signs, str):
            raise UserError(
                f"cast {cast.name!r} takes random signs, which a recipe draws in each step; give signs"
            )
        return cast.hadamard.signs

    def require_groups(self, cast: Cast, axis: int) -> None:
        """Refuse a sharding that cuts the groups of a cast's Hadamard transform along `axis`."""
        if self.shard is not None:
            self.shard.require_aligned(cast.hadamard.size, axis, cast)

    def random_over(self, blocks: Blocks) -> Randomness:
        """The source of random bits for a tensor that is split into blocks; numbers are split with it.

        The bits of an element are those of its index in the global tensor, whatever pads its block.
        """
        random = self.random
        if isinstance(random, RandomStream) and self.shard is not None:
            random = self.shard.bits_of(random)
        if isinstance(random, RandomStream) and blocks.is_ragged:
            random = random.uniform(blocks.shape)
        return blocks.split(random) if isinstance(random, torch.Tensor) else random

    def random_over_grid(self, blocks: Blocks, cast: Cast, axis: int) -> Randomness:
        """The source of random bits for the scales of blocks: one number for each.

        They are those of the block's index in the global grid, from a stream of their own. If random numbers
        are given, a block has that of its first element.
        """
        random = self.random
        if isinstance(random, torch.Tensor):
            numbers = blocks.split(random)
            for dim in blocks.inner:
                numbers = numbers.narrow(dim, 0, 1)
            return numbers
        if isinstance(random, RandomStream):
            random = random.of_scales()
            random = random if self.shard is None else self.shard.grid(cast, axis).bits_of(random)
            return blocks.align(random) if isinstance(random, torch.Tensor) else random
        return random

    def row_amax(self, amax: torch.Tensor, blocks: Blocks, axis: int, cast: Cast) -> torch.Tensor:
        """The largest magnitude of each row of the global tensor, from those of the local blocks.

        If some columns of a row have a scale of their own, that of these columns, once for each block.
        """
        dim = axis % len(blocks.shape)
        if columns := cast.scales.outer_columns:
            if self.shard is not None:
                self.shard.require_aligned(columns, dim, cast, "second scales")
            return _largest_of_groups(amax, blocks.grid_dim(dim), columns // blocks.size[dim])
        largest = amax.amax(blocks.grid_dim(dim), keepdim=True)
        return largest if self.shard is None else all_reduce_max(largest, self.shard.axes[dim].groups)

    def global_amax(self, amax: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
        """The largest magnitudes of the global tensor's blocks, from those of the local elements."""
        if self.shard is None or self.scale is not None:
            return amax
        if cast.block is None and not amax.numel():  # this process holds no element of the tensor
            amax = amax.new_zeros([1] * amax.ndim)
        return self.shard.reduce_amax(amax, cast, axis)

    def tensor_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of the global tensor (0-dim), from those of the local blocks."""
        largest = amax.amax() if amax.numel() else amax.new_zeros(())
        largest = largest if self.shard is None else all_reduce_max(largest, self.shard.groups)
        return largest if self.held is None else torch.where(self.held > 0, self.held, largest)

    def token_mean(self, x: torch.Tensor, sums: torch.Tensor | None = None) -> torch.Tensor:
        """The mean over the tokens (all dimensions but the last) of the global tensor, in x's dtype.

        Sums are float64, so that their order over processes changes no digit but by the rarest chance. What
        is not finite is left out: it breaks its own blocks.
        """
        if sums is None:
            tokens = list(range(x.ndim - 1))
            sums = torch.where(x.isfinite(), x, 0.0).sum(tokens, keepdim=True, dtype=torch.float64)
        count = x.numel() // max(x.shape[-1], 1)
        if self.shard is not None:
            sums = all_reduce_sum(sums, self.shard.axes[0].groups)
            count = self.shard.axes[0].size
        return (sums / max(count, 1)).to(x.dtype)

    def global_elements(self, x: torch.Tensor) -> torch.Tensor:
        """All elements of the global tensor in no particular order, for what has to sort them."""
        return x if self.shard is None else self.shard.all_gather_flat(x)


def _largest_of_groups(amax: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The largest of each `size` entries along a dimension, in the place of every one of them."""
    count = amax.shape[dim]
    padded = amax.new_zeros([-count % size if d == dim else n for d, n in enumerate(amax.shape)])
    groups = torch.cat([amax, padded], dim).unflatten(dim, (-1, size))
    return groups.amax(dim + 1, keepdim=True).expand_as(groups).flatten(dim, dim + 1).narrow(dim, 0, count)


DEFAULT_CONTEXT = QuantContext()

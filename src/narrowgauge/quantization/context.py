"""The record of everything quantization depends on besides the tensor and its cast.

Most tensors need nothing of it (`DEFAULT_CONTEXT`). Blocks, scales and random bits are laid out on the global
tensor, so that sharding never changes a value; whatever quantization needs to know about it is a method.
"""

from dataclasses import dataclass, replace

import torch

from narrowgauge.formats import Randomness, RandomStream
from narrowgauge.quantization.blocks import Blocks
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.sharding.shard import TensorShard
from narrowgauge.system.collectives import all_reduce_max, all_reduce_sum
from narrowgauge.system.errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class QuantContext:
    """The circumstances under which a tensor is quantized.

    Attributes:
        random: The random bits of stochastic rounding: a `RandomStream`, a `torch.Generator`, values in
            [0, 1) in the shape of the tensor, or None for torch's default generator.
        signs: One +1 or -1 for each element of a Hadamard group; for casts with `signs = "random"`.
        scale: A 0-dim float32 factor applied to the full tensor before rounding (delayed scaling, scales that
            devices share). None computes it from the tensor.
        held: 0-dim float32, the amax to use instead of the tensor's own under a tensor scale that is held for
            some steps; 0 or None uses the tensor's own.
        amax_out: 0-dim float32, raised by `kernels.quantize` and `kernels.emulate` to the tensor's amax, if
            that is finite; or None.
        channels: bool, for each channel of the local tensor whether the cast keeps it apart; None takes
            those with the tensor's largest norms.
        shard: The position of the tensor in a global one. Its processes quantize at the same time.
        amax: 0-dim float32, max |x| of the local tensor, if the kernel that wrote it has computed it; then
            `kernels` need not read the tensor for it.
        limits: The two 0-dim values that `transforms.clamp_outliers` clamps to; None computes them.
    """

    random: Randomness = None
    signs: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shard: TensorShard | None = None
    held: torch.Tensor | None = None
    amax_out: torch.Tensor | None = None
    channels: torch.Tensor | None = None
    limits: tuple[torch.Tensor, torch.Tensor] | None = None
    amax: torch.Tensor | None = None

    def drawn_for(self, x: torch.Tensor, cast: Cast) -> "QuantContext":
        """The same context with random values drawn in advance if a cast needs them more than once."""
        is_once = cast.rounding != "stochastic" or not (cast.candidates or cast.correct)
        if is_once or isinstance(self.random, RandomStream | torch.Tensor):
            return self
        drawn = torch.rand(x.shape, dtype=torch.float32, generator=self.random, device=x.device)
        return replace(self, random=drawn)

    def signs_of(self, cast: Cast) -> torch.Tensor | tuple[int, ...]:
        """The signs of a cast's transform; () means those that belong to its size."""
        if self.signs is not None:
            return self.signs
        if isinstance(cast.signs, str):
            raise UserError(
                f"cast {cast.name!r} takes random signs, which a recipe draws in each step; give signs"
            )
        return cast.signs

    def random_over(self, blocks: Blocks) -> Randomness:
        """The source of random bits for a tensor split into blocks; explicit values are split with it.

        An element's bits follow from its index in the global tensor, regardless of padding in its block.
        """
        random = self.random
        if isinstance(random, RandomStream) and self.shard is not None:
            random = self.shard.bits_of(random)
        if isinstance(random, RandomStream) and blocks.is_ragged:
            random = random.uniform(blocks.shape)
        return blocks.split(random) if isinstance(random, torch.Tensor) else random

    def random_over_grid(self, blocks: Blocks, cast: Cast, axis: int) -> Randomness:
        """The random bits of scales that are rounded stochastically: one value per block.

        They belong to the block's index in the global grid, in a separate stream. If random values are given,
        a block uses that of its first element.
        """
        random = self.random if cast.scale_rounding == "stochastic" else None
        if isinstance(random, torch.Tensor):
            numbers = blocks.split(random)
            for dim in blocks.inner:
                numbers = numbers.narrow(dim, 0, 1)
            return numbers
        if isinstance(random, RandomStream):
            random = random.of_scales()
            random = random if self.shard is None else self.shard.grid(cast, axis).bits_of(random)
        return blocks.align(random) if isinstance(random, torch.Tensor) else random

    def row_amax(self, amax: torch.Tensor, blocks: Blocks, axis: int, cast: Cast) -> torch.Tensor:
        """The amax of each row of the global tensor, from the amaxes of the local blocks.

        If groups of columns within a row have their own outer scale, the amax of the group, repeated per
        block.
        """
        dim = axis % len(blocks.shape)
        along, columns = blocks.grid_dim(dim), cast.outer_columns
        if not columns:
            largest = amax.amax(along, keepdim=True)
            return largest if self.shard is None else all_reduce_max(largest, self.shard.axes[dim].groups)
        if self.shard is not None:
            self.shard.require_aligned(columns, dim, cast, "second scales")
        of_blocks = [columns // blocks.size[dim] if d == along else 1 for d in range(amax.ndim)]
        groups = Blocks.of(amax.shape, of_blocks)
        split = groups.split(amax)
        return groups.merge(split.amax(along + 1, keepdim=True).expand_as(split)) if groups.inner else amax

    def global_amax(self, amax: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
        """The amaxes of the global tensor's blocks, from the magnitudes of the local elements."""
        if self.shard is None or self.scale is not None:
            return amax
        return self.shard.reduce_amax(amax, cast, axis)

    def tensor_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """The amax of the global tensor (0-dim), from the amaxes of the local blocks."""
        largest = amax.amax() if amax.numel() else amax.new_zeros(())
        largest = largest if self.shard is None else all_reduce_max(largest, self.shard.groups)
        return largest if self.held is None else torch.where(self.held > 0, self.held, largest)

    def token_mean(self, x: torch.Tensor, sums: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of the global tensor over tokens (all dimensions but the last), in x's dtype.

        Sums are float64, so the order of summation over processes almost never changes a digit. Non-finite
        values are skipped: they already invalidate their own blocks.
        """
        if sums is None:
            tokens = list(range(x.ndim - 1))
            sums = torch.where(x.isfinite(), x, 0.0).sum(tokens, keepdim=True, dtype=torch.float64)
        count = x.numel() // max(x.shape[-1], 1)
        if self.shard is not None:
            sums = all_reduce_sum(sums, self.shard.axes[0].groups)
            count = self.shard.axes[0].size
        return (sums / max(count, 1)).to(x.dtype)


DEFAULT_CONTEXT = QuantContext()

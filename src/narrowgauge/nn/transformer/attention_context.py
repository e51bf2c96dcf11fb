"""The context of one pass of attention: the casts of the operands of its six matmuls, and the operands.

    matmul     operands     contracts
    q kᵀ       q, k         H
    p v        p, v         S
    pᵀ do      p, do        T
    do vᵀ      do, v        H
    ds k       ds, k        S
    dsᵀ q      ds, q        T

In the backward pass an operand is quantized only if the gradient that it is multiplied with is: with `do` in
a format without scales, its two matmuls use p and v unquantized, and the same holds for `ds` with k and q.

Blocks lie within a matrix, so a process or a piece that holds only part of a tensor changes no block, with
one exception: a scale of the full tensor needs the amax of all pieces, and of the heads of other processes.
It is computed first and passed to every piece. Random bits follow from an element's index in the global
tensor [B, all heads, rows, columns] of the step.

Legend: B sequences, N query heads, K key-value heads, Z = B N matrices, T queries, S keys, H head_dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from narrowgauge.collectives import all_reduce_max
from narrowgauge.formats import Randomness, RandomStream, torch_dtype
from narrowgauge.kernels import emulate as emulate_matrix
from narrowgauge.nn.gemm import Operand
from narrowgauge.nn.observer import Observation, Observer
from narrowgauge.nn.shards import EqualShare
from narrowgauge.quantization import Cast, QuantContext
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.passes.rounding import block_amax
from narrowgauge.quantization.quantize import emulate_in_context
from narrowgauge.quantization.transforms import transformed
from narrowgauge.recipes import ATTENTION_PRODUCTS, GRADIENT_PLACES

_PRODUCTS = list(ATTENTION_PRODUCTS)


@dataclass(frozen=True, slots=True, eq=False)
class PieceContext(QuantContext):
    """The context in which a piece [heads, rows, columns] is quantized.

    Attributes:
        largest: 0-dim float32, the amax of the global tensor; None if the piece is all of it.
        first: int64 [heads], the index in the global tensor of each head's first element in the piece.
        width: The columns of the global tensor.
    """

    largest: torch.Tensor | None = None
    first: torch.Tensor | None = None
    width: int = 0

    def global_amax(self, amax: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
        """The amaxes of blocks; that of the full tensor is known."""
        is_known = cast.block is None and self.largest is not None
        return self.largest.expand_as(amax) if is_known and self.largest is not None else amax

    def tensor_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """The amax of the global tensor, 0-dim."""
        return amax.amax() if self.largest is None else self.largest

    def random_over(self, blocks: Blocks) -> Randomness:
        """The random values of a piece that is split into blocks."""
        if not isinstance(self.random, RandomStream):
            return self.random
        return blocks.split(self.random.uniform_at(self._indices(blocks)))

    def random_over_grid(self, blocks: Blocks, cast: Cast, axis: int) -> Randomness:
        """The random values of the scales of blocks: from a separate stream, at their first element."""
        if not isinstance(self.random, RandomStream):
            return self.random
        numbers = blocks.split(self.random.of_scales().uniform_at(self._indices(blocks)))
        for dim in blocks.inner:
            numbers = numbers.narrow(dim, 0, 1)
        return numbers

    def _indices(self, blocks: Blocks) -> torch.Tensor:
        """The index of each element of the piece in the global tensor."""
        assert self.first is not None
        rows, columns = (torch.arange(n, device=self.first.device) for n in blocks.shape[-2:])
        return self.first[:, None, None] + rows[:, None] * self.width + columns


@dataclass(frozen=True, slots=True)
class Part:
    """Some matrices and some rows of a tensor [Z, rows, columns]."""

    matrices: slice
    rows: slice

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The part of a tensor; a dimension of size 1 is shared by all parts."""
        x = x if x.shape[0] == 1 else x[self.matrices]
        return x if x.shape[1] == 1 else x[:, self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionContext:
    """Everything that a forward and a backward pass of attention need besides the tensors.

    Attributes:
        casts: The cast of each place; None, or a place that is missing, for the dtype of q.
        shard: The heads of this process.
        keys: int32 [12, 2], keys of the step's random streams, two per matmul; None if no cast is random.
        first_sample: The index in the global batch of the first sequence.
        observer: Sees every operand.
    """

    casts: Mapping[str, Cast | None]
    shard: EqualShare = field(default_factory=EqualShare)
    keys: torch.Tensor | None = None
    first_sample: int | torch.Tensor = 0
    observer: Observer | None = None

    def cast(self, place: str, product: str) -> Cast | None:
        """The cast of an operand of a matmul."""
        gradient = next((p for p in ATTENTION_PRODUCTS[product] if p in GRADIENT_PLACES), None)
        if gradient is not None:
            of_gradient = self.casts.get(gradient)
            if gradient != place and (of_gradient is None or not of_gradient.is_scaled):
                return None
        return self.casts.get(place)

    def largest(self, x: torch.Tensor, place: str, product: str, axis: int) -> torch.Tensor | None:
        """The amax of a tensor over the heads of all processes, if a scale needs it."""
        cast = self.cast(place, product)
        if cast is None or not needs_largest(cast):
            return None
        return self.over_processes(largest_of(x, cast, axis, QuantContext()))

    def over_processes(self, largest: torch.Tensor) -> torch.Tensor:
        """The maximum over the heads of all processes."""
        return all_reduce_max(largest, self.shard.groups)

    def operand(
        self,
        x: torch.Tensor,
        place: str,
        product: str,
        axis: int,
        dtype: torch.dtype,
        largest: torch.Tensor | None = None,
        part: Part | None = None,
        shape: tuple[int, ...] = (),
    ) -> Operand:
        """The operand that a matmul sees of a tensor [Z, rows, columns]; it contracts its `axis`, -1 or -2.

        Args:
            x: The tensor, or a part of it.
            place: Its place.
            dtype: The dtype of a place without a cast.
            largest: The amax of the global tensor, if a scale needs it and x is not all of it.
            part: Which part of the tensor x is; None for all of it.
            shape: The shape of the local tensor, [B, heads, rows, columns]; for random bits.
        """
        cast = self.cast(place, product)
        if cast is None or not cast.is_scaled:
            seen = Operand(x.to(dtype if cast is None else torch_dtype(cast.element)))
            if self.observer is not None and cast is not None:
                self.observer.operand(Observation(place, x, seen.values, None, cast, axis, QuantContext()))
            return seen
        wide = torch.promote_types(x.dtype, torch.float32)
        if largest is None and part is None and self.shard.groups:
            largest = self.largest(x, place, product, axis)
        context = PieceContext(largest=largest)
        if cast.is_random and self.keys is not None:
            context = self._with_bits(context, place, product, part, shape)
        if axis == -1 and largest is None and context.random is None and _is_by_row(cast):
            values, scale = emulate_matrix(x.flatten(0, 1), cast, -1, wide)
            operand = Operand(values.view(*x.shape[:2], -1), scale)
        else:
            operand = Operand(*emulate_in_context(x, cast, axis, wide, context))
        if self.observer is not None:
            self.observer.operand(Observation(place, x, *operand, cast, axis, context))
        return operand

    def _with_bits(
        self, context: PieceContext, place: str, product: str, part: Part | None, shape: tuple[int, ...]
    ) -> PieceContext:
        """The context with the random bits of a part of a tensor."""
        assert self.keys is not None
        B, heads, rows, columns = shape
        key = self.keys[2 * _PRODUCTS.index(product) + ATTENTION_PRODUCTS[product].index(place)]
        number_B1 = torch.arange(B, device=key.device)[:, None] + self.first_sample
        head = torch.arange(heads, device=key.device) + self.shard.index * heads
        matrix_Z = (number_B1 * (heads * self.shard.count) + head).flatten()
        first = matrix_Z * (rows * columns)
        if part is not None:
            first = first[part.matrices] + (part.rows.start or 0) * columns
        return replace(context, random=RandomStream(key), first=first, width=columns)


def _is_by_row(cast: Cast) -> bool:
    """Whether the blocks along the last axis are the same in one matrix of all rows."""
    return cast.block is None or cast.block[0] == 1


def needs_largest(cast: Cast | None) -> bool:
    """Whether a cast has a scale of the full tensor."""
    return cast is not None and cast.is_scaled and (cast.block is None or cast.tensor_scale == "tensor")


def largest_of(x: torch.Tensor, cast: Cast, axis: int, context: QuantContext) -> torch.Tensor:
    """The amax of one piece that the scale of the full tensor is computed from: 0-dim float32.

    Non-finite values affect only their block if blocks have separate scales.
    """
    x = transformed(x, cast, axis, context)
    blocks = blocks_of(x.shape, cast, axis)
    amax = block_amax(blocks.split(x), blocks)
    if cast.block is not None:
        amax = torch.where(amax.isfinite(), amax, 0.0)
    return amax.amax() if amax.numel() else amax.new_zeros(())

"""Checks that sharding does not divide a quantization block over ranks, before any tensor is created.

Blocks are laid out on the global tensors, and a rank must hold blocks of a fixed size in full; otherwise
`TensorShard.reduce_amax` would raise in the middle of a step. Legend: M tokens, N outputs, K inputs.

    M    over `context`; in the head and in the residual stream over `context` x `tensor`
    N    over `tensor` in qkv, up and gate_up
    K    over `tensor` in attention_out and down

Rows of weights, their state and moments are also sharded over `shard` x `context` (ZeRO 1 and up).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from narrowgauge.distributed.dims import ParallelDims
from narrowgauge.nn import EqualShare
from narrowgauge.quantization import Cast, ShardAxis, full_axis
from narrowgauge.quantization.state.parameter_state import SMALLEST_NARROW
from narrowgauge.recipes import DIMENSIONS, Recipe
from narrowgauge.recipes.resolve import operands_of
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.distributed.parallel.tensor_parallel import COLUMN_SHARDED, row_sizes, shard_sizes
from narrowgauge.trainer.models import ModelConfig

WEIGHT_STATE = ("weight", "master", "grad")


@dataclass(frozen=True)
class ShardedDimension:
    """One dimension of a global tensor, as it is sharded."""

    what: str  # the name of its entries, for messages
    shards: tuple[ShardAxis, ...]  # the axis of each rank
    degrees: Mapping[str, int]  # number of processes on each mesh axis that shards it

    def require_aligned(self, size: int, what: str, cast: Cast, where: str) -> None:
        """Refuse a sharding that divides blocks of `size` entries.

        The `UserError` names the place, the cast and the degrees of parallelism.
        """
        if not all(axis.is_aligned_to(size) for axis in self.shards):
            degrees = " x ".join(f"parallel.{name} = {n}" for name, n in self.degrees.items() if n > 1)
            raise UserError(
                f"{where}: cast {cast.name!r} has {what} of {size}, and dividing {self.shards[0].size} "
                f"{self.what} over {degrees} would cut some; use fewer processes there, another dimension, "
                "or another cast in that place"
            )

    def under_fsdp(self, dims: ParallelDims, of_expert: bool = False) -> "ShardedDimension":
        """The dimension as FSDP shards it further; an expert over the processes that have the same one."""
        if not dims.is_sharded:
            return self
        degrees = {"shard": dims.shard, "context": dims.context}
        if of_expert and dims.expert > 1:
            degrees = {"shard / parallel.expert": dims.expert_shard}
        ranks = prod(degrees.values())
        shards = tuple(axis.chunk(rank, ranks) for axis in self.shards for rank in range(ranks))
        return ShardedDimension(self.what, shards, {**self.degrees, **degrees})


def check_blocks(
    model: ModelConfig, recipe: Recipe, sequence_length: int, sequences: int, parallel_dims: ParallelDims
) -> None:
    """Refuse degrees of parallelism that divide blocks of a recipe's casts.

    Args:
        model: The model.
        recipe: The recipe.
        sequence_length: Tokens in a sequence.
        sequences: Sequences in a micro-batch.
        parallel_dims: The degrees of parallelism.

    Raises:
        UserError: a block would be divided; names place, layer and mesh axis.
    """
    dims = parallel_dims
    if dims.tensor == dims.context == 1 and not dims.is_sharded:
        return
    for name, block, dimensions in _layers(model, sequence_length, sequences, dims):
        of_layer = recipe.for_layer([(name, block)], model.layers)
        for place, cast in operands_of(of_layer):
            _check(cast, [dimensions[d] for d in DIMENSIONS[place]], f"{place} of {name}")
        weight = [dimensions["N"].under_fsdp(dims, ".experts." in name), dimensions["K"]]
        is_shared = block is None and model.tied_head  # a tied head has the wide state of the embedding
        for place in () if is_shared else WEIGHT_STATE:
            _check(of_layer.state[place], weight, f"{place} of {name}")
        _check_moments(recipe, weight, name)
    tokens = _tokens(sequence_length, sequences, {"context": dims.context, "tensor": dims.tensor})
    _check(recipe.stream, [tokens, _full(model.dim, "columns")], "stream")
    others = {"embedding": model.vocab_size}
    others |= {"position_embedding": model.max_sequence_length} if model.positions == "learned" else {}
    for name, rows in others.items():
        _check_moments(recipe, [_full(rows, "rows").under_fsdp(dims), _full(model.dim, "columns")], name)


def _layers(
    model: ModelConfig, sequence_length: int, sequences: int, dims: ParallelDims
) -> Iterator[tuple[str, int | None, dict[str, ShardedDimension]]]:
    """The name of each linear layer, its block, and its dimensions M, N and K."""
    D, tensor, context = model.dim, dims.tensor, dims.context
    M = _tokens(sequence_length, sequences, {"context": context})
    K = {name: _full(D, "inputs") for name in row_sizes(model)}
    N = {name: _over_tensor(sizes, "outputs", tensor) for name, sizes in row_sizes(model).items()}
    for name, size in zip(COLUMN_SHARDED, (model.heads * model.head_dim, model.ffn_dim), strict=True):
        N[name], K[name] = _full(D, "outputs"), _over_tensor([size], "inputs", tensor)
    experts = [f"experts.{i}." for i in range(model.experts)] or [""]
    for block in range(model.layers):
        for name in N:
            is_mlp = name not in ("qkv", "attention_out")
            for expert in experts if is_mlp else [""]:
                yield f"blocks.{block}.{expert}{name}", block, {"M": M, "N": N[name], "K": K[name]}
    M = _tokens(sequence_length, sequences, {"context": context, "tensor": tensor})
    yield "head", None, {"M": M, "N": _full(model.vocab_size, "outputs"), "K": _full(D, "inputs")}


def _tokens(length: int, sequences: int, degrees: dict[str, int]) -> ShardedDimension:
    count = prod(degrees.values())
    if count == 1:
        return _full(sequences * length, "tokens")
    axes = (EqualShare(index, count, ()).axis(sequences, length // count) for index in range(count))
    return ShardedDimension("tokens", tuple(axes), degrees)


def _over_tensor(sizes: list[int], what: str, tensor: int) -> ShardedDimension:
    if tensor == 1:
        return _full(sum(sizes), what)
    shards = tuple(shard_sizes(sizes, index, tensor) for index in range(tensor))
    return ShardedDimension(what, shards, {"tensor": tensor})


def _full(size: int, what: str) -> ShardedDimension:
    return ShardedDimension(what, (full_axis(size),), {})


def _check_moments(recipe: Recipe, dimensions: list[ShardedDimension], name: str) -> None:
    rows, columns = (dimension.shards[0].size for dimension in dimensions)
    if rows * columns >= SMALLEST_NARROW:
        for place in ("m", "v"):
            _check(recipe.state[place], dimensions, f"{place} of {name}")


def _check(cast: Cast | None, dimensions: list[ShardedDimension], where: str) -> None:
    """Check a matrix: its dimension across blocks, and the one along them."""
    if cast is None:
        return
    for dimension, size in zip(dimensions, cast.block or (0, 0), strict=True):
        # A block of the full extent is shared: ranks agree on its scale. One that is expanded is not.
        size = size or (dimension.shards[0].size if cast.expand or cast.codebook else 1)
        dimension.require_aligned(size, "blocks", cast, where)
    if cast.hadamard:
        dimensions[1].require_aligned(cast.hadamard, "transforms", cast, where)

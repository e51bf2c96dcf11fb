"""Does a grid cut blocks of numbers in two? Asked before anything is made: arithmetic, without tensors.

Blocks lie on the global tensors, and a process has to hold those of a size of its own whole; otherwise
`quantization.part` would refuse in the middle of a step. Legend: M tokens, N outputs, K inputs.

    M    over `context`; in the head over `context` x `tensor`
    N    over `tensor` in qkv, up and gate_up
    K    over `tensor` in attention_out and down

Rows of weights, their state and moments are also cut over `shard` x `context` (ZeRO 1 and up).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from narrowgauge.distributed.mesh import ParallelDims
from narrowgauge.distributed.parallel.tensor_parallel import BY_COLUMNS, rows_of, shard_sizes
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig
from narrowgauge.nn import TokenShard
from narrowgauge.optim.optimizer import SMALLEST_NARROW
from narrowgauge.quantization import Cast, ShardAxis, full_axis
from narrowgauge.recipes import Recipe

# Of the tensor in each place the dimension across the product, and the one that it contracts.
DIMENSIONS = {
    "fprop.x": "MK",
    "saved": "MK",
    "fprop.w": "NK",
    "dgrad.dy": "MN",
    "dgrad.w": "KN",
    "wgrad.dy": "NM",
    "wgrad.x": "KM",
}
WEIGHT_STATE = ("weight", "master", "grad")


@dataclass(frozen=True)
class Divided:
    """One dimension of a global tensor: what each process has of it, and which numbers divide it."""

    what: str
    shares: tuple[ShardAxis, ...]
    by: Mapping[str, int]

    def require_whole(self, size: int, kind: str, cast: Cast, where: str) -> None:
        """Refuse a division that cuts runs of `size` entries."""
        if not all(axis.is_aligned_to(size) for axis in self.shares):
            by = " x ".join(f"parallel.{name} = {n}" for name, n in self.by.items() if n > 1)
            raise UserError(
                f"{where}: cast {cast.name!r} has {kind} of {size}, and dividing {self.shares[0].size} "
                f"{self.what} over {by} would cut some; use fewer processes there, another dimension, or "
                "another cast in that place"
            )

    def cut(self, layout: ParallelDims) -> "Divided":
        """The same where FSDP cuts it further."""
        if not layout.is_cut:
            return self
        by = {"shard": layout.shard, "context": layout.context}
        count = layout.shard * layout.context
        cut = tuple(axis.chunk(rank, count) for axis in self.shares for rank in range(count))
        return Divided(self.what, cut, {**self.by, **by})


def check_blocks(
    model: ModelConfig, recipe: Recipe, sequence_length: int, sequences: int, layout: ParallelDims
) -> None:
    """Refuse a grid that cuts blocks of a recipe's casts, by the names of place, layer and direction.

    `sequences` are those of a micro-batch.
    """
    if layout.tensor == layout.context == 1 and not layout.is_cut:
        return
    for name, block, dimensions in _layers(model, sequence_length, sequences, layout):
        of_layer = recipe.for_layer([(name, block)], model.layers)
        for place, cast in _operands(of_layer):
            _check(cast, [dimensions[d] for d in DIMENSIONS[place]], f"{place} of {name}")
        weight = [dimensions["N"].cut(layout), dimensions["K"]]
        is_shared = block is None and model.tied_head  # which keeps its own state wide
        for place in () if is_shared else WEIGHT_STATE:
            _check(of_layer.state[place], weight, f"{place} of {name}")
        _check_moments(recipe, weight, name)
    others = {"embedding": model.vocab_size}
    others |= {"position_embedding": model.max_sequence_length} if model.positions == "learned" else {}
    for name, rows in others.items():
        _check_moments(recipe, [_whole(rows, "rows").cut(layout), _whole(model.dim, "columns")], name)


def _layers(
    model: ModelConfig, sequence_length: int, sequences: int, layout: ParallelDims
) -> Iterator[tuple[str, int | None, dict[str, Divided]]]:
    """The name of each linear layer, its block, and its dimensions M, N and K."""
    D, tensor, context = model.dim, layout.tensor, layout.context
    M = _tokens(sequence_length, sequences, {"context": context})
    K = {name: _whole(D, "inputs") for name in rows_of(model)}
    N = {name: _over_tensor(sizes, "outputs", tensor) for name, sizes in rows_of(model).items()}
    for name, size in zip(BY_COLUMNS, (model.heads * model.head_dim, model.ffn_dim), strict=True):
        N[name], K[name] = _whole(D, "outputs"), _over_tensor([size], "inputs", tensor)
    for block in range(model.layers):
        for name in N:
            yield f"blocks.{block}.{name}", block, {"M": M, "N": N[name], "K": K[name]}
    M = _tokens(sequence_length, sequences, {"context": context, "tensor": tensor})
    yield "head", None, {"M": M, "N": _whole(model.vocab_size, "outputs"), "K": _whole(D, "inputs")}


def _tokens(length: int, sequences: int, by: dict[str, int]) -> Divided:
    count = prod(by.values())
    if count == 1:
        return _whole(sequences * length, "tokens")
    axes = (TokenShard(index, count, ()).axis(sequences, length // count) for index in range(count))
    return Divided("tokens", tuple(axes), by)


def _over_tensor(sizes: list[int], what: str, tensor: int) -> Divided:
    if tensor == 1:
        return _whole(sum(sizes), what)
    shares = tuple(shard_sizes(sizes, index, tensor) for index in range(tensor))
    return Divided(what, shares, {"tensor": tensor})


def _whole(size: int, what: str) -> Divided:
    return Divided(what, (full_axis(size),), {})


def _operands(recipe: Recipe) -> Iterator[tuple[str, Cast]]:
    """The places of a layer and the casts that they ever have."""
    for casts in (recipe.casts, *(rule.casts for rule in recipe.rules)):
        yield from casts.items()
    if isinstance(recipe.saved, Cast):
        yield "saved", recipe.saved


def _check_moments(recipe: Recipe, dimensions: list[Divided], name: str) -> None:
    rows, columns = (dimension.shares[0].size for dimension in dimensions)
    if rows * columns >= SMALLEST_NARROW:
        for place in ("m", "v"):
            _check(recipe.state[place], dimensions, f"{place} of {name}")


def _check(cast: Cast | None, dimensions: list[Divided], where: str) -> None:
    """Of a matrix the dimension across blocks, and the one along them."""
    if cast is None:
        return
    for dimension, size in zip(dimensions, cast.block or (0, 0), strict=True):
        # A block of the full extent is shared: processes agree on its scale. One that is stretched is not.
        size = size or (dimension.shares[0].size if cast.expand or cast.codebook else 1)
        dimension.require_whole(size, "blocks", cast, where)
    if cast.hadamard:
        dimensions[1].require_whole(cast.hadamard, "transforms", cast, where)

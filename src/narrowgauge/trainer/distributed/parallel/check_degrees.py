"""Checks that degrees of parallelism fit a model and its recipe, before any tensor is created.

Sharding must not divide a quantization block over ranks. Blocks are laid out on the global tensors, and a
rank must hold blocks of a fixed size in full; otherwise `TensorShard.reduce_amax` would raise in the middle
of a step. Legend: M tokens, N outputs, K inputs.

    M    over `context`; in the head and in the residual stream over `context` x `tensor`
    N    over `tensor` in qkv, up and gate_up
    K    over `tensor` in attention_out and down

Rows of weights, their state and moments are also sharded over `shard` x `context` (ZeRO 1 and up).

A process holds one or several runs of neighbouring entries. Those of all processes are equally long, so that
no block is divided if one process's lengths are whole blocks; only the last run of all may be shorter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from narrowgauge.distributed.dims import ParallelDims
from narrowgauge.quantization import Cast
from narrowgauge.quantization.state.parameter_state import SMALLEST_NARROW
from narrowgauge.recipes import Recipe
from narrowgauge.recipes.resolve import DIMENSIONS, operands_of
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.distributed.parallel.layers import COLUMN_SHARDED, row_sizes
from narrowgauge.trainer.models import ModelConfig

WEIGHT_STATE = ("weight", "master", "grad")


@dataclass(frozen=True)
class Dimension:
    """One dimension of a global tensor, as it is sharded."""

    what: str  # the name of its entries, for messages
    size: int
    runs: tuple[int, ...] = ()  # the lengths of what each process holds; () if it holds all
    degrees: Mapping[str, int] = field(default_factory=dict)  # processes on each mesh axis that shards it

    def under_fsdp(self, dims: ParallelDims, of_expert: bool = False) -> "Dimension":
        """The dimension as FSDP shards it further; an expert over the processes that have the same one."""
        if not dims.is_sharded:
            return self
        degrees = {"shard": dims.shard, "context": dims.context}
        if of_expert and dims.expert > 1:
            degrees = {"shard / parallel.expert": dims.expert_shard}
        local = sum(self.runs) or self.size
        chunk = -(-local // prod(degrees.values()))
        runs = (*self.runs, chunk) if chunk < local else self.runs
        return Dimension(self.what, self.size, runs, {**self.degrees, **degrees})


def check_degrees(
    model: ModelConfig, recipe: Recipe, sequence_length: int, sequences: int, dims: ParallelDims
) -> None:
    """Refuse degrees of parallelism that do not divide a model, or that divide blocks of a recipe's casts.

    Experts cannot be sharded over `tensor` or `context`, and there must be at least as many layers as
    pipeline stages.

    Args:
        model: The model.
        recipe: The recipe.
        sequence_length: Tokens in a sequence.
        sequences: Sequences in a micro-batch.
        dims: The degrees of parallelism.

    Raises:
        UserError: Names the setting; where a block would be divided, place, layer and mesh axis.
    """
    _check_tensor_parallel(model, sequence_length, dims)
    _check_expert_parallel(model, dims)
    if dims.tensor * dims.context > 1 or dims.is_sharded:
        for cast, dimensions, where in _casts(model, recipe, sequence_length, sequences, dims):
            if cast is not None:
                _check(cast, dimensions, where)


def _check_tensor_parallel(model: ModelConfig, sequence_length: int, dims: ParallelDims) -> None:
    both = dims.tensor * dims.context
    if model.experts and both > 1:
        raise UserError(
            f"model.experts = {model.experts} with parallel.tensor x parallel.context = {both}: the tokens "
            "of an expert come from full sequences on one process; use parallel.shard, replicate or pipeline"
        )
    rules = [
        ("model.kv_heads", model.kv_heads, both, "parallel.tensor x parallel.context"),
        ("model.heads", model.heads, both, "parallel.tensor x parallel.context"),
        ("model.ffn_dim", model.ffn_dim, dims.tensor, "parallel.tensor"),
        ("data.sequence_length", sequence_length, both, "parallel.tensor x parallel.context"),
    ]
    for name, size, count, setting in rules:
        if size % count:
            raise UserError(
                f"{name} = {size} cannot be divided by {setting} = {count}; choose a divisor of it"
            )
    if model.layers < dims.stages:
        raise UserError(
            f"model.layers = {model.layers} are fewer than the {dims.stages} stages that "
            f"parallel.pipeline = {dims.pipeline} and parallel.chunks = {dims.chunks} ask for; choose fewer"
        )


def _check_expert_parallel(model: ModelConfig, dims: ParallelDims) -> None:
    n, shard = dims.expert, dims.shard
    if n == 1:
        return
    if not model.experts:
        raise UserError(
            f"parallel.expert = {n}, and the model has no experts to divide; leave it out, or take a mixture "
            "of experts (--model moe-debug, or model.experts)"
        )
    if model.experts % n:
        raise UserError(
            f"model.experts = {model.experts} cannot be divided by parallel.expert = {n}; choose a divisor"
        )
    if shard % n or not dims.is_sharded:
        raise UserError(
            f"parallel.expert = {n} with parallel.shard = {shard} and parallel.zero = {dims.zero}: "
            "experts are divided over processes that shard the other weights; set parallel.shard to a "
            f"multiple of {n}, and parallel.zero to 1, 2 or 3"
        )


def _casts(
    model: ModelConfig, recipe: Recipe, sequence_length: int, sequences: int, dims: ParallelDims
) -> Iterator[tuple[Cast | None, list[Dimension], str]]:
    """Each cast of a matrix, with its dimension across blocks and the one along them, and where it is."""
    moments: dict[str, list[Dimension]] = {}
    for name, block, dimensions in _layers(model, sequence_length, sequences, dims):
        of_layer = recipe.for_layer([(name, block)], model.layers)
        for place, cast in operands_of(of_layer):
            yield cast, [dimensions[d] for d in DIMENSIONS[place][0]], f"{place} of {name}"
        weight = moments[name] = [dimensions["N"].under_fsdp(dims, ".experts." in name), dimensions["K"]]
        is_shared = block is None and model.tied_head  # a tied head has the wide state of the embedding
        for place in () if is_shared else WEIGHT_STATE:
            yield of_layer.state[place], weight, f"{place} of {name}"
    columns = Dimension("columns", model.dim)
    moments["embedding"] = [Dimension("rows", model.vocab_size).under_fsdp(dims), columns]
    if model.positions == "learned":
        rows = Dimension("rows", model.max_sequence_length)
        moments["position_embedding"] = [rows.under_fsdp(dims), columns]
    tokens = _tokens(sequence_length, sequences, {"context": dims.context, "tensor": dims.tensor})
    yield recipe["stream"], [tokens, columns], "stream"
    for name, weight in moments.items():
        if prod(dimension.size for dimension in weight) >= SMALLEST_NARROW:
            for place in ("m", "v"):
                yield recipe.state[place], weight, f"{place} of {name}"


def _layers(
    model: ModelConfig, sequence_length: int, sequences: int, dims: ParallelDims
) -> Iterator[tuple[str, int | None, dict[str, Dimension]]]:
    """The name of each linear layer, its block, and its dimensions M, N and K."""
    D, tensor, context = model.dim, dims.tensor, dims.context
    M = _tokens(sequence_length, sequences, {"context": context})
    K = {name: Dimension("inputs", D) for name in row_sizes(model)}
    N = {name: _over_tensor(sizes, "outputs", tensor) for name, sizes in row_sizes(model).items()}
    for name, size in zip(COLUMN_SHARDED, (model.heads * model.head_dim, model.ffn_dim), strict=True):
        N[name], K[name] = Dimension("outputs", D), _over_tensor([size], "inputs", tensor)
    experts = [f"experts.{i}." for i in range(model.experts)] or [""]
    for block in range(model.layers):
        for name in N:
            is_mlp = name not in ("qkv", "attention_out")
            for expert in experts if is_mlp else [""]:
                yield f"blocks.{block}.{expert}{name}", block, {"M": M, "N": N[name], "K": K[name]}
    M = _tokens(sequence_length, sequences, {"context": context, "tensor": tensor})
    yield "head", None, {"M": M, "N": Dimension("outputs", model.vocab_size), "K": Dimension("inputs", D)}


def _tokens(length: int, sequences: int, degrees: dict[str, int]) -> Dimension:
    count = prod(degrees.values())
    return Dimension("tokens", sequences * length, (length // count,) if count > 1 else (), degrees)


def _over_tensor(sizes: list[int], what: str, tensor: int) -> Dimension:
    runs = tuple(size // tensor for size in sizes) if tensor > 1 else ()
    return Dimension(what, sum(sizes), runs, {"tensor": tensor})


def _check(cast: Cast, dimensions: list[Dimension], where: str) -> None:
    """Refuse a matrix whose shards divide blocks, or transforms along its last dimension."""
    # A block of the full extent is shared: ranks agree on its scale. One that is expanded is not.
    full = [dimension.size if cast.expand or cast.codebook else 1 for dimension in dimensions]
    sizes = [size or whole for size, whole in zip(cast.block or (0, 0), full, strict=True)]
    aligned = [*zip(dimensions, sizes, ("blocks", "blocks"), strict=True)]
    for dimension, size, what in [*aligned, (dimensions[1], cast.hadamard or 1, "transforms")]:
        if any(run % size for run in dimension.runs):
            degrees = " x ".join(f"parallel.{name} = {n}" for name, n in dimension.degrees.items() if n > 1)
            raise UserError(
                f"{where}: cast {cast.name!r} has {what} of {size}, and dividing {dimension.size} "
                f"{dimension.what} over {degrees} would cut some; use fewer processes there, another "
                "dimension, or another cast in that place"
            )

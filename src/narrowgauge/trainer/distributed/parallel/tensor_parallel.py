"""Tensor and context parallelism: this process's shards of a converted model that has no values yet.

    qkv, up, gate_up         rows (heads, hidden units) over `tensor`; one segment of each fused part
    attention_out, down      columns over `tensor`, over which their outputs are summed
    everything else          replicated over `tensor`, whose processes have different tokens there
    attention                heads over `tensor` x `context`: each process has all tokens of its heads

Elsewhere tokens are sharded over `tensor` (sequence parallelism), and everywhere over `context`. The record
of a parameter (`quantization.ParamState.shard`) has its position in the global tensor.

DTensor's `parallelize_module` cannot do this. The rows of a fused qkv on one rank are three segments of the
global weight, of unequal lengths if heads share keys. A placement is one segment for each rank and dimension;
`_StridedShard`, which is private, is several of equal lengths; and no placement carries the scales of blocks.
`ShardAxis` supports both. FSDP2 shards the local tensors further.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.dims import ParallelDims
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.nn import EqualShare, Linear, LinearShards, NarrowAttention, NarrowResidual
from narrowgauge.quantization import ShardAxis, TensorShard, ensure_state, full_axis, state_of
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.distributed.parallel.sequence_parallel import (
    all_gather_tokens,
    all_to_all_heads,
    all_to_all_tokens,
    reduce_scatter_tokens,
)
from narrowgauge.trainer.models import ModelConfig, Transformer

COLUMN_SHARDED = ("attention_out", "down")  # the layers of a block whose columns `tensor` shards


def check_tensor_parallel(model: ModelConfig, sequence_length: int, parallel_dims: ParallelDims) -> None:
    """Refuse degrees of parallelism that do not divide the model's dimensions.

    The `UserError` names the setting. Experts cannot be sharded over `tensor` or `context`, and there must be
    at least as many layers as pipeline stages.
    """
    dims = parallel_dims
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


def shard_blocks(model: Transformer, mesh: Mesh) -> None:
    """Shard a converted model on the meta device over `tensor` and `context`, in place."""
    groups = mesh.groups("context")
    tokens = EqualShare(mesh.index("context"), mesh.size("context"), groups) if groups else None
    model.share = (
        mesh.index("context") * mesh.size("tensor") + mesh.index("tensor"),
        mesh.size("sequence"),
    )
    for block in model.blocks:
        if not isinstance(block, nn.Identity):  # an Identity stands for a block of another stage
            _shard_block(block, model, mesh, tokens)
    groups = mesh.groups("context", "tensor")
    if isinstance(model.head, Linear) and groups:
        model.head.shards = LinearShards(EqualShare(*model.share, groups))
    for module in model.modules():
        if isinstance(module, NarrowResidual) and groups:
            module.tokens = EqualShare(*model.share, groups)
    for _, parameter in model.named_parameters():
        if state_of(parameter).shard is None:
            ensure_state(parameter).shard = TensorShard(tuple(full_axis(n) for n in parameter.shape))


def _shard_block(block: Any, model: Transformer, mesh: Mesh, tokens: EqualShare | None) -> None:
    block.share = model.share
    # Heads are divided over `tensor`, and the share of each process there over `context`.
    index = mesh.index("tensor") * mesh.size("context") + mesh.index("context")
    block.heads_share = (index, mesh.size("sequence"))
    if isinstance(block.attention, NarrowAttention):
        block.attention.shard = EqualShare(index, mesh.size("sequence"), mesh.groups("context", "tensor"))
    if tokens is not None:
        block.to_heads = partial(all_to_all_heads, group=tokens.groups[0])
        block.to_tokens = partial(all_to_all_tokens, group=tokens.groups[0])
    if mesh.size("tensor") == 1:
        for layer in block.modules():
            if isinstance(layer, Linear):
                layer.shards = LinearShards(tokens)
        return
    count = mesh.size("tensor")
    block.heads_NKK = tuple(heads // count for heads in block.heads_NKK)
    for name, sizes in row_sizes(model.config).items():
        _shard_rows(getattr(block, name), sizes, mesh, tokens)
    for name in COLUMN_SHARDED:
        _shard_columns(getattr(block, name), mesh, tokens)


def row_sizes(config: ModelConfig) -> dict[str, list[int]]:
    """For each layer of a block whose rows `tensor` shards, the number of rows of each part of its weight."""
    N, K, H, F = config.heads, config.kv_heads, config.head_dim, config.ffn_dim
    up = {"gate_up": [F, F]} if config.mlp == "swiglu" else {"up": [F]}
    return {"qkv": [N * H, K * H, K * H]} | up


def shard_sizes(
    sizes: list[int], index: int, count: int, groups: tuple[dist.ProcessGroup, ...] = ()
) -> ShardAxis:
    """Rank `index`'s slice, of `count`, of each of several concatenated parts of these sizes."""
    segments, start = [], 0
    for size in sizes:
        segments.append((start + index * size // count, size // count))
        start += size
    return ShardAxis(start, tuple(segments), groups)


def _axis(sizes: list[int], mesh: Mesh) -> ShardAxis:
    return shard_sizes(sizes, mesh.index("tensor"), mesh.size("tensor"), mesh.groups("tensor"))


def _shard_rows(layer: object, sizes: list[int], mesh: Mesh, tokens: EqualShare | None) -> None:
    assert isinstance(layer, Linear)
    rows = _axis(sizes, mesh)
    layer.shards = LinearShards(
        tokens, outputs=rows, before=partial(all_gather_tokens, group=mesh.group("tensor"))
    )
    layer.out_features = rows.length
    layer.weight = _empty_parameter(TensorShard((rows, full_axis(layer.in_features))))
    if layer.bias is not None:
        layer.bias = _empty_parameter(TensorShard((rows,)))


def _shard_columns(layer: object, mesh: Mesh, tokens: EqualShare | None) -> None:
    assert isinstance(layer, Linear)
    columns = _axis([layer.in_features], mesh)
    layer.shards = LinearShards(
        tokens, inputs=columns, after=partial(reduce_scatter_tokens, group=mesh.group("tensor"))
    )
    layer.in_features = columns.length
    layer.weight = _empty_parameter(TensorShard((full_axis(layer.out_features), columns)))


def _empty_parameter(shard: TensorShard) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shard.local_shape, device="meta"))
    ensure_state(parameter).shard = shard
    return parameter

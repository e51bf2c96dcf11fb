"""Which piece of each weight is whose: tensor and context parallelism on a model that has no numbers yet.

    qkv, up, gate_up         rows (heads, hidden units) over `tensor`; a fused weight has a run of each part
    attention_out, down      columns, their products being summed over `tensor`
    everything else          whole on each process of `tensor`, which see different tokens there

Between the two kinds, tokens are divided over `tensor` (sequence parallelism), and everywhere over `context`.
A parameter's record (`quantization.ParamState.shard`) tells where it lies in the whole model's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.mesh import Mesh, ParallelDims
from narrowgauge.distributed.parallel.sequence_parallel import (
    all_gather_tokens,
    all_to_all_heads,
    all_to_all_tokens,
    reduce_scatter_tokens,
)
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig, Transformer
from narrowgauge.nn import Linear, LinearShards, TokenShard
from narrowgauge.quantization import ShardAxis, TensorShard, ensure_state, full_axis, state_of

BY_COLUMNS = ("attention_out", "down")  # the layers of a block whose columns `tensor` divides


def check_tensor_parallel(model: ModelConfig, sequence_length: int, layout: ParallelDims) -> None:
    """Refuse a grid that a model's dimensions do not allow, by the name of what stands in the way."""
    tensor, context, pipeline = layout.tensor, layout.context, layout.pipeline
    rules = [
        ("model.kv_heads", model.kv_heads, tensor * context, "parallel.tensor x parallel.context"),
        ("model.heads", model.heads, tensor * context, "parallel.tensor x parallel.context"),
        ("model.ffn_dim", model.ffn_dim, tensor, "parallel.tensor"),
        ("data.sequence_length", sequence_length, tensor * context, "parallel.tensor x parallel.context"),
    ]
    for name, size, count, whose in rules:
        if size % count:
            raise UserError(f"{name} = {size} cannot be divided by {whose} = {count}; choose a divisor of it")
    if model.layers < layout.stages:
        raise UserError(
            f"model.layers = {model.layers} are fewer than the {layout.stages} stages that "
            f"parallel.pipeline = {pipeline} and parallel.chunks = {layout.chunks} ask for; choose fewer"
        )


def shard_blocks(model: Transformer, mesh: Mesh) -> None:
    """Leave this process its pieces of a converted model on the meta device, without numbers yet."""
    context = mesh.groups("context")
    own = TokenShard(mesh.index("context"), mesh.size("context"), context) if context else None
    for block in model.blocks:
        if isinstance(block, nn.Identity):  # another stage's
            continue
        _shard_block(block, model.config, mesh, own)
    shared = mesh.groups("context", "tensor")
    model.share = (
        mesh.index("context") * mesh.size("tensor") + mesh.index("tensor"),
        mesh.size("sequence"),
    )
    if isinstance(model.head, Linear) and shared:
        model.head.shards = LinearShards(TokenShard(*model.share, shared))
    for _, parameter in model.named_parameters():
        if state_of(parameter).shard is None:
            ensure_state(parameter).shard = TensorShard(tuple(full_axis(n) for n in parameter.shape))


def _shard_block(block: Any, config: ModelConfig, mesh: Mesh, own: TokenShard | None) -> None:
    if own is not None:
        block.to_heads = partial(all_to_all_heads, group=own.groups[0])
        block.to_tokens = partial(all_to_all_tokens, group=own.groups[0])
    if mesh.size("tensor") == 1:
        for layer in _linears(block):
            layer.shards = LinearShards(own)
        return
    count = mesh.size("tensor")
    block.heads_NKK = tuple(heads // count for heads in block.heads_NKK)
    for name, sizes in rows_of(config).items():
        _shard_rows(getattr(block, name), sizes, mesh, own)
    for name in BY_COLUMNS:
        _shard_columns(getattr(block, name), mesh, own)


def rows_of(config: ModelConfig) -> dict[str, list[int]]:
    """The layers of a block whose rows `tensor` divides: how many rows each part of their weight has."""
    N, K, H, F = config.heads, config.kv_heads, config.head_dim, config.ffn_dim
    up = {"gate_up": [F, F]} if config.mlp == "swiglu" else {"up": [F]}
    return {"qkv": [N * H, K * H, K * H]} | up


def _linears(block: nn.Module) -> Iterator[Linear]:
    return (m for m in block.modules() if isinstance(m, Linear))


def shard_sizes(
    sizes: list[int], index: int, count: int, groups: tuple[dist.ProcessGroup, ...] = ()
) -> ShardAxis:
    """Of parts of these sizes one after the other, the share of process `index` of `count` of each."""
    runs, start = [], 0
    for size in sizes:
        runs.append((start + index * size // count, size // count))
        start += size
    return ShardAxis(start, tuple(runs), groups)


def _axis(sizes: list[int], mesh: Mesh) -> ShardAxis:
    return shard_sizes(sizes, mesh.index("tensor"), mesh.size("tensor"), mesh.groups("tensor"))


def _shard_rows(layer: object, sizes: list[int], mesh: Mesh, own: TokenShard | None) -> None:
    assert isinstance(layer, Linear)
    rows = _axis(sizes, mesh)
    layer.shards = LinearShards(
        own, outputs=rows, before=partial(all_gather_tokens, group=mesh.group("tensor"))
    )
    layer.out_features = rows.length
    layer.weight = _piece(TensorShard((rows, full_axis(layer.in_features))))
    if layer.bias is not None:
        layer.bias = _piece(TensorShard((rows,)))


def _shard_columns(layer: object, mesh: Mesh, own: TokenShard | None) -> None:
    assert isinstance(layer, Linear)
    columns = _axis([layer.in_features], mesh)
    layer.shards = LinearShards(
        own, inputs=columns, after=partial(reduce_scatter_tokens, group=mesh.group("tensor"))
    )
    layer.in_features = columns.length
    layer.weight = _piece(TensorShard((full_axis(layer.out_features), columns)))


def _piece(part: TensorShard) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(part.local_shape, device="meta"))
    ensure_state(parameter).shard = part
    return parameter

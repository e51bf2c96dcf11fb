"""Tensor, context and expert parallelism: this process's shards of a converted model without values.

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

**Between processes that compute a sequence together**, forward and backward:

    all_gather_tokens       local tokens -> all tokens               backward: reduce-scatter
    reduce_scatter_tokens   partial sums for all tokens -> the sum   backward: all-gather
                            for the local tokens
    all_to_all_heads        local tokens of all heads -> all tokens of local heads     backward: the inverse
    all_to_all_tokens       the inverse

The first two are sequence parallelism (arXiv 2205.05198), the last two the all-to-all of DeepSpeed-Ulysses
(arXiv 2309.14509): one process computes each head's attention in full, exactly as without parallelism.

**Experts.** Each process of `expert` holds some experts of every layer and gets everyone's tokens:

    counts      each process sends each other one the number of its tokens for the experts there
    dispatch    tokens go to their experts                     backward: their gradients come back
    combine     the experts' outputs come back                 backward: their gradients go to the experts

The three are all-to-alls of torch.distributed (GShard, arXiv 2006.16668, section 3.3), without a capacity
limit: nothing is dropped and nothing padded. An expert sees one matrix, the tokens of the first process of
the group before the second's, as if one process had all their sequences in one micro-batch. So a
recipe's scales, blocks and random bits of an expert follow from the group's tokens. The other weights are
sharded over `shard` as usual. An expert is sharded over the processes that hold the same one, as a separate
FSDP2 unit: it then uses memory and traffic only while it computes.

Legend: B sequences, T tokens, t = T / processes, D the model's width, N heads, n = N / processes, H head_dim;
R assignments of local tokens to experts, S those that arrive, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.nn import EqualShare, Linear, LinearShards, NarrowAttention, NarrowResidual
from narrowgauge.quantization import ShardAxis, TensorShard, ensure_state, full_axis
from narrowgauge.system.collectives import all_gather_rows, comm_tag, reduce_scatter_rows
from narrowgauge.system.second_derivative import FirstOrderFunction
from narrowgauge.trainer.models import Expert, ModelConfig, Transformer, experts_of

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

COLUMN_SHARDED = ("attention_out", "down")  # the layers of a block whose columns `tensor` shards


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


def _shard_block(block: Any, model: Transformer, mesh: Mesh, tokens: EqualShare | None) -> None:
    block.share = model.share
    # Heads are divided over `tensor`, and the share of each process there over `context`.
    index = mesh.index("tensor") * mesh.size("context") + mesh.index("context")
    block.heads_share = (index, mesh.size("sequence"))
    if isinstance(block.attention, NarrowAttention):
        block.attention.shard = EqualShare(index, mesh.size("sequence"), mesh.groups("context", "tensor"))
    if tokens is not None:
        there, back, group = all_to_all_heads, all_to_all_tokens, tokens.groups[0]
        block.to_heads = partial(exchange, there=there, back=back, group=group)
        block.to_tokens = partial(exchange, there=back, back=there, group=group)
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


def _axis(sizes: list[int], mesh: Mesh) -> ShardAxis:
    """This rank's slice over `tensor` of each of several concatenated parts of these sizes."""
    index, count, segments, start = mesh.index("tensor"), mesh.size("tensor"), [], 0
    for size in sizes:
        segments.append((start + index * size // count, size // count))
        start += size
    return ShardAxis(start, tuple(segments), mesh.groups("tensor"))


def _shard_rows(layer: object, sizes: list[int], mesh: Mesh, tokens: EqualShare | None) -> None:
    assert isinstance(layer, Linear)
    rows, group = _axis(sizes, mesh), mesh.group("tensor")
    layer.shards = LinearShards(
        tokens,
        outputs=rows,
        before=partial(exchange, there=all_gather_tokens, back=reduce_scatter_tokens, group=group),
    )
    layer.out_features = rows.length
    layer.weight = _empty_parameter(TensorShard((rows, full_axis(layer.in_features))))
    if layer.bias is not None:
        layer.bias = _empty_parameter(TensorShard((rows,)))


def _shard_columns(layer: object, mesh: Mesh, tokens: EqualShare | None) -> None:
    assert isinstance(layer, Linear)
    columns, group = _axis([layer.in_features], mesh), mesh.group("tensor")
    layer.shards = LinearShards(
        tokens,
        inputs=columns,
        after=partial(exchange, there=reduce_scatter_tokens, back=all_gather_tokens, group=group),
    )
    layer.in_features = columns.length
    layer.weight = _empty_parameter(TensorShard((full_axis(layer.out_features), columns)))


def _empty_parameter(shard: TensorShard) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shard.local_shape, device="meta"))
    ensure_state(parameter).shard = shard
    return parameter


def exchange(x: torch.Tensor, there: Collective, back: Collective, group: dist.ProcessGroup) -> torch.Tensor:
    """The result of a collective, whose gradient takes another one back."""
    y: torch.Tensor = _Exchange.apply(x, there, back, group)
    return y


class _Exchange(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Collective, back: Collective, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back, ctx.group = back, group
        with comm_tag("activations"):
            return there(x, group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with comm_tag("activations"):
            return ctx.back(dy, ctx.group), None, None, None


def all_gather_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, t, D] of each process -> [B, T, D], in the order of their ranks."""
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = all_gather_rows(x_TBD.flatten(), group).view(-1, *x_TBD.shape[1:])
    return out_TBD.transpose(0, 1).contiguous()


def reduce_scatter_tokens(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, D] of each process -> [B, t, D], the sum over processes for this one's tokens."""
    x_TBD = x_BTD.transpose(0, 1).contiguous()
    out_TBD = reduce_scatter_rows(x_TBD.view(group.size(), -1), group).view(-1, *x_TBD.shape[1:])
    return out_TBD.transpose(0, 1).contiguous()


def _all_to_all(scatter: int, gather: int, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Divide dimension `scatter` over the processes, and concatenate what they send along `gather`."""
    sent = torch.stack(x.chunk(group.size(), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gather)


all_to_all_heads = partial(_all_to_all, 2, 1)  # [B, t, N, H] -> [B, T, n, H]
all_to_all_tokens = partial(_all_to_all, 1, 2)  # [B, T, n, H] -> [B, t, N, H]


def divide_experts(model: Transformer, mesh: Mesh, batch_size: int) -> None:
    """Keep this process's experts of each layer, and route tokens to the experts of others, in place.

    Args:
        model: a converted model on the meta device.
        mesh: the mesh of the run.
        batch_size: the sequences of a step.
    """
    if mesh.size("expert") == 1:
        return
    index, count, group = mesh.index("expert"), mesh.size("expert"), mesh.group("expert")
    each = batch_size // mesh.parallel_dims.data
    offset = (mesh.data_index - index) * each - count * mesh.data_index * each
    for layer in experts_of(model.blocks):
        of_each = layer.count // count
        layer.local = range(index * of_each, (index + 1) * of_each)
        layer.exchange = partial(exchange_tokens, group=group)
        for number in set(range(layer.count)) - set(layer.local):
            layer.add_module(str(number), nn.Identity())  # it stands for an expert of another process
        for module in layer.modules():
            if isinstance(module, Linear) and module is not layer.router:
                module.shards = replace(module.shards, pool=count, pool_offset=offset)


def local_experts(module: nn.Module) -> nn.ModuleList:
    """The experts in a module that other processes do not have; none if all processes have all."""
    blocks = getattr(module, "blocks", [module])
    layers = (layer for layer in experts_of(blocks) if layer.is_divided)
    return nn.ModuleList(m for layer in layers for m in layer.children() if isinstance(m, Expert))


def exchange_tokens(
    x_RD: torch.Tensor,
    tokens_E: torch.Tensor,
    sizes: Sequence[int],
    compute: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Let the experts of all processes of a group compute.

    Args:
        x_RD: the assignments of this process, sorted by expert.
        tokens_E: the number of tokens for each expert, on the device.
        sizes: the same numbers on the host.
        compute: maps the tokens of each local expert to its outputs.
        group: the processes; each has an equal share of the experts, in rank order.

    Returns:
        The experts' outputs for `x_RD`, in its order.
    """
    each = len(sizes) // group.size()
    arriving = _counts(tokens_E, sizes, group)
    sent = [sum(sizes[i : i + each]) for i in range(0, len(sizes), each)]
    arrived = [sum(counts) for counts in arriving]
    there, back = partial(_send_rows, sent, arrived), partial(_send_rows, arrived, sent)
    x_SD = exchange(x_RD, there, back, group)
    parts = x_SD.split([n for counts in arriving for n in counts])  # by process, and by expert within it
    results = compute([torch.cat(parts[e::each]) for e in range(each)])
    by_expert = [y.split([counts[e] for counts in arriving]) for e, y in enumerate(results)]
    y_SD = torch.cat([y for from_process in zip(*by_expert, strict=True) for y in from_process])
    return exchange(y_SD, back, there, group)


def _counts(tokens_E: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The number of tokens from each process for each local expert; on the meta device, as from this one."""
    arriving_E = torch.empty_like(tokens_E)
    with comm_tag("activations"):
        dist.all_to_all_single(arriving_E, tokens_E, group=group)
    each = len(sizes) // group.size()
    if tokens_E.is_meta:
        begin = group.rank() * each
        return [list(sizes[begin : begin + each])] * group.size()
    counts: list[list[int]] = arriving_E.view(-1, each).tolist()
    return counts


def _send_rows(
    sent: list[int], arrived: list[int], x: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send a number of rows to each process of a group; returns what they send."""
    received = x.new_empty(sum(arrived), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), arrived, sent, group=group)
    return received

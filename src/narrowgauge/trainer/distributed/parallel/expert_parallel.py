"""Expert parallelism: each process of `expert` holds some experts of every layer and gets everyone's tokens.

    counts      each process sends each other one the number of its tokens for the experts there
    dispatch    tokens go to their experts                     backward: their gradients come back
    combine     the experts' outputs come back                 backward: their gradients go to the experts

The three are all-to-alls of torch.distributed (GShard, arXiv 2006.16668, section 3.3), without a capacity
limit: nothing is dropped and nothing padded. An expert sees one matrix, the tokens of the first process of
the group before the second's, as if one process had all their sequences in one micro-batch. So a
recipe's scales, blocks and random bits of an expert follow from the group's tokens.

The other weights are sharded over `shard` as usual. An expert is sharded over the processes that hold the
same one, as a separate FSDP2 unit: it then uses memory and traffic only while it computes.

Legend: R assignments of local tokens, S those that arrive, D dim, E experts, P processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.nn import Linear, PooledSequences
from narrowgauge.system.collectives import comm_tag
from narrowgauge.trainer.distributed.parallel.tensor_parallel import exchange
from narrowgauge.trainer.models import Expert, Transformer, experts_of


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
    pool = PooledSequences((mesh.data_index - index) * each, mesh.data_index * each, count)
    for layer in experts_of(model.blocks):
        of_each = layer.count // count
        layer.local = range(index * of_each, (index + 1) * of_each)
        layer.exchange = partial(exchange_tokens, group=group)
        for number in set(range(layer.count)) - set(layer.local):
            layer.add_module(str(number), nn.Identity())  # it stands for an expert of another process
        for module in layer.modules():
            if isinstance(module, Linear) and module is not layer.router:
                module.shards = replace(module.shards, pool=pool)


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
    there, back = partial(_all_to_all, sent, arrived), partial(_all_to_all, arrived, sent)
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


def _all_to_all(
    sent: list[int], arrived: list[int], x: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send a number of rows to each process of a group; returns what they send."""
    received = x.new_empty(sum(arrived), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), arrived, sent, group=group)
    return received

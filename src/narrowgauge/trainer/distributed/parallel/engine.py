"""The collective part of an optimizer step, without the update: forward, backward, reductions.

gradients over `data`      summed by DDP or FSDP2, during the backward pass
gradients over `tensor`    summed here for replicated weights, as the ranks of `tensor` see different tokens
histories of operands      reduced here, all layers in one collective of each kind
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.dims import ParallelDims
from narrowgauge.distributed.fsdp import renew_gather_scales
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.quantized_reduce import all_reduce_gradient_states, wire_formats
from narrowgauge.kernels.amax import begin_amaxes
from narrowgauge.nn.histories import reduce_histories
from narrowgauge.nn.linear import accumulating
from narrowgauge.optim import ModelGroup, Optimizer
from narrowgauge.quantization import local_tensor, plain_gradient, state_of
from narrowgauge.system.collectives import all_reduce_flat, all_reduce_values, gather_objects
from narrowgauge.system.torch_compat import overflow_flags
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed.parallel.layers import local_experts
from narrowgauge.trainer.distributed.parallel.micro_batch_graph import CudaGraphs, MicroBatchGraphs
from narrowgauge.trainer.distributed.pipeline import MicroBatch, Pipeline, StageInput
from narrowgauge.trainer.models import Transformer, objective_of

T = TypeVar("T")


class Engine:
    """A model on the processes of a mesh; on a mesh of one process, just the model."""

    def __init__(
        self, model: Transformer, mesh: Mesh, device: torch.device, modules: Sequence[Callable[..., Any]]
    ) -> None:
        """Take the `modules` that `parallelize` made, or one function that computes the loss."""
        self.model, self.mesh, self.device, self.modules = model, mesh, device, list(modules)
        self.graphs: MicroBatchGraphs | None = None
        self.pipeline: Pipeline | None = None
        if mesh.parallel_dims.stages > 1:
            self.pipeline = Pipeline(model, cast(list[nn.Module], self.modules), mesh, device)

    @classmethod
    def of_one_process(cls, model: Transformer) -> "Engine":
        """The engine of a model on a single process."""
        device = next(model.parameters()).device
        return cls(model, Mesh(ParallelDims(), device), device, [model.loss])

    def attach(self, optimizer: Optimizer) -> None:
        """Pass an optimizer the group of ranks that hold the parameters."""
        if not self.mesh.is_single:
            assert dist.group.WORLD is not None
            optimizer.model_group = ModelGroup(dist.group.WORLD, self.mesh.size("stage"))

    def record_graphs(self, recorder: CudaGraphs) -> None:
        """From now on repeat recorded launches where a micro-batch can be a graph (`graph_gap`)."""
        self.graphs = MicroBatchGraphs(self.model, self._loss, self._same_weights, recorder)

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        begin: Callable[[int], None],
        scale: Callable[[torch.Tensor], torch.Tensor],
        after_forward: Callable[[torch.Tensor], None] | None = None,
        is_watched: bool = False,
    ) -> torch.Tensor:
        """Run the forward and the backward pass of each micro-batch.

        Args:
            micro_batches: this process's micro-batches of the step.
            begin: `begin(i)` is called before the forward pass of the i-th.
            scale: maps a loss to the value that the backward pass starts from.
            after_forward: is called with each weighted loss, after its forward pass; not in a pipeline.
            is_watched: whether an observer reads values within the passes.

        Returns:
            The sum of the weighted losses, in the shape of `Transformer.loss_shape`.
        """
        if self.graphs is not None:
            if after_forward is None and not is_watched and self.graphs.take(micro_batches):
                return self.graphs.accumulate(micro_batches, begin)
            self.graphs.release()
        total = torch.zeros(self.model.loss_shape, dtype=torch.float32, device=self.device)
        if self.pipeline is not None:
            return self.pipeline.run(StageInput(micro_batches, total, begin, scale), with_backward=True)
        with self._same_weights(len(micro_batches)):
            for i, (_, batch, weight) in enumerate(micro_batches):
                begin(i)
                begin_amaxes()
                with self._gradient_sync(is_last=i == len(micro_batches) - 1):
                    loss = self._loss(batch) * weight
                    objective = objective_of(loss)
                    if after_forward is not None:
                        after_forward(objective.detach())
                    scale(objective).backward()
                total += loss.detach()
        return total

    def _same_weights(self, micro_batches: int) -> AbstractContextManager[None]:
        """Let layers accumulate gradients and keep codes, if this process has the model to itself.

        Codes of weights are kept if a step has several micro-batches and no block is recomputed in full,
        which indicates that memory is short. Codes take a byte a weight, which is kept for the backward pass
        anyway; there they are copied to lie along the other axis. Unless an option saves memory, codes of
        small weights are kept along both axes.
        """
        if not self.mesh.is_single:
            return nullcontext()
        has_memory = self.model.selective or not self.model.recompute
        saves_none = not (self.model.recompute or self.model.chunked_loss)
        return accumulating(self.model, micro_batches > 1 and has_memory, keeps_both=saves_none)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """This process's term of the mean loss of a batch; the mean is the sum over `sequence` and stages."""
        if self.graphs is not None:
            self.graphs.release()
        if self.pipeline is not None:
            zero = torch.zeros((), dtype=torch.float32, device=self.device)
            loss = self.pipeline.run(StageInput([MicroBatch(0, batch, 1.0)], zero), with_backward=False)
        else:
            loss = self._loss(batch)
        modules: list[object] = [*self.modules, *self.model.modules()]
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()  # frees full weights, as a backward pass would
        return loss

    def _loss(self, batch: Batch) -> torch.Tensor:
        batch = batch.to(self.device)
        targets = batch.targets if batch.ignores else None
        loss: torch.Tensor = self.modules[0](batch.x_BT, batch.y_BT, batch.position_BT, targets)
        return loss

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        """Sum gradients after the last micro-batch only; after each if they are sharded (ZeRO 2 and 3)."""
        objective: object = self.modules[0]
        if isinstance(objective, DistributedDataParallel):
            return nullcontext() if is_last else objective.no_sync()
        if isinstance(objective, FSDPModule) and self.mesh.parallel_dims.zero == 1:
            objective.set_requires_gradient_sync(is_last)
            objective.set_reshard_after_backward(is_last)
            objective.set_is_last_backward(is_last)
        return nullcontext()

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Reduce the gradients and histories that neither DDP nor FSDP reduces."""
        if self.mesh.is_single:
            return
        self._reduce_gradient_states()
        if self.mesh.size("tensor") > 1:  # of parameters that each of its processes has in full
            group = self.mesh.group("tensor")
            gradients = (plain_gradient(p) for p in self.model.parameters() if group not in _groups(p))
            all_reduce_flat([local_tensor(g) for g in gradients if g is not None], group)
        if self.mesh.first_last_group is not None and self.model.config.tied_head:
            gradient = plain_gradient(self.model.embedding.weight)
            all_reduce_flat([] if gradient is None else [local_tensor(gradient)], self.mesh.first_last_group)
        self._reduce_histories()

    def _reduce_gradient_states(self) -> None:
        """Sum gradients at rest: replicated ones over `tensor`, and over `data` those that FSDP does not."""
        wires = wire_formats(self.model)
        narrow = {p: g for p in self.model.parameters() if (g := state_of(p).gradient) is not None}
        for axis in ("tensor",) if self.mesh.parallel_dims.is_sharded else ("data", "tensor"):
            if self.mesh.size(axis) > 1:
                group = self.mesh.group(axis)
                reduced = [p for p in narrow if axis == "data" or group not in _groups(p)]
                all_reduce_gradient_states([narrow[p] for p in reduced], [wires[p] for p in reduced], group)

    def _reduce_histories(self) -> None:
        """Reduce the histories of experts over the processes that hold them, all others over the stage."""
        experts = dict.fromkeys(local_experts(self.model).modules())
        reduce_histories((m for m in self.model.modules() if m not in experts), self.mesh.group("stage"))
        if experts and self.mesh.size("expert_data") > 1:
            reduce_histories(experts, self.mesh.group("expert_data"))

    def after_update(self) -> None:
        """Compute new scales for the gathers, once the weights have changed."""
        if self.mesh.parallel_dims.is_sharded:
            renew_gather_scales(self.model)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all processes, in float64."""
        if self.mesh.is_single:
            return list(values)
        return all_reduce_values(values, [None], self.device, torch.float64)

    def sum_over_data(self, count: int) -> int:
        """The sum of a count over the processes that have different sequences."""
        groups = self.mesh.groups("replicate", "shard")
        return int(all_reduce_values([count], groups, self.device, torch.int64)[0]) if groups else count

    @property
    def rank(self) -> int:
        """Rank of this process among all."""
        return 0 if self.mesh.is_single else dist.get_rank()

    def gather(self, value: T) -> list[T]:
        """The value of each process, in rank order, on all of them."""
        return gather_objects(value, None if self.mesh.is_single else dist.group.WORLD)

    def all_reduce_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """Set the overflow flags on all processes if any has a non-finite gradient, so that their loss scales
        stay equal."""
        if not self.mesh.is_single:
            for flag in overflow_flags(scaler, optimizer).values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)


def _groups(p: torch.Tensor) -> list[dist.ProcessGroup]:
    """The process groups over which a parameter is sharded."""
    shard = state_of(p).shard
    return [] if shard is None else shard.groups

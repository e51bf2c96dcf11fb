"""One optimizer step over all processes, but for the update: forward, backward, and what has to be summed.

Where gradients come together:

    over `data`       by DDP or FSDP2, beside the backward pass
    over `tensor`     here, for weights that are whole on each of its processes: these saw different tokens
    histories         largest magnitudes of delayed scales, all layers in one collective
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.data import Batch
from narrowgauge.distributed.comm.grad_hooks import all_reduce_gradient_states, wire_formats
from narrowgauge.distributed.mesh import Mesh, ParallelDims
from narrowgauge.distributed.parallel.fsdp import renew_gather_scales
from narrowgauge.distributed.parallel.pipeline_schedule import Pipeline
from narrowgauge.distributed.parallel.pipeline_stage import MicroBatch, StageInput
from narrowgauge.distributed.simulate.fake_mesh import FakeMesh
from narrowgauge.distributed.simulate.fake_pipeline import FakePipeline
from narrowgauge.models import Transformer
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.optim import ModelGroup, Optimizer
from narrowgauge.quantization import local_tensor, state_of
from narrowgauge.quantization.purpose import comm_tag


class Engine:
    """A model on the processes of a mesh; of a mesh of one, just the model."""

    def __init__(
        self, model: Transformer, mesh: Mesh, device: torch.device, modules: Sequence[Callable[..., Any]]
    ) -> None:
        """`modules` are what `build` gave, or the one function that computes the loss."""
        self.model, self.mesh, self.device, self.modules = model, mesh, device, list(modules)
        self.pipeline: Pipeline | FakePipeline | None = None
        if isinstance(mesh, FakeMesh) and mesh.layout.stages > 1:
            self.pipeline = FakePipeline(model, self.modules, mesh)
        elif mesh.layout.stages > 1:
            self.pipeline = Pipeline(model, cast(list[nn.Module], self.modules), mesh, device)

    @classmethod
    def alone(cls, model: Transformer) -> "Engine":
        """A model that is all in this process."""
        device = next(model.parameters()).device
        return cls(model, Mesh(ParallelDims(), device), device, [model.loss])

    def attach(self, optimizer: Optimizer) -> None:
        """Tell an optimizer who holds the parameters with it."""
        if not self.mesh.is_alone:
            assert dist.group.WORLD is not None
            optimizer.model_group = ModelGroup(dist.group.WORLD, self.mesh.size("stage"))

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        begin: Callable[[int], None],
        scale: Callable[[torch.Tensor], torch.Tensor],
        after_forward: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Forward and backward of this process's micro-batches; the sum of their weighted losses.

        `begin(i)` is called before the forward pass of the i-th, `after_forward` between that and its
        backward pass, which starts from `scale(loss)`.
        """
        total = self._zero()
        if self.pipeline is not None:
            return self.pipeline.run(StageInput(micro_batches, begin, scale, total), with_backward=True)
        for i, (_, batch, weight) in enumerate(micro_batches):
            begin(i)
            with self._last(i == len(micro_batches) - 1):
                loss = self._loss(batch) * weight
                if after_forward is not None:
                    after_forward(loss.detach())
                scale(loss).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """This process's part of the mean loss of a batch, a term of a sum over `sequence` and stages."""
        if self.pipeline is not None:
            work = StageInput([MicroBatch(0, batch, 1.0)], lambda i: None, lambda loss: loss, self._zero())
            loss = self.pipeline.run(work, with_backward=False)
        else:
            loss = self._loss(batch)
        if self.mesh.layout.is_cut:
            self._cut_again()
        return loss

    def _cut_again(self) -> None:
        """After a forward pass without a backward pass, which would do it."""
        every: list[object] = [*self.modules, *self.model.modules()]
        for module in every:
            if isinstance(module, FSDPModule):
                module.reshard()

    def _loss(self, batch: Batch) -> torch.Tensor:
        batch = batch.to(self.device)
        targets = batch.targets if batch.ignores else None
        loss: torch.Tensor = self.modules[0](batch.x_BT, batch.y_BT, batch.position_BT, targets)
        return loss

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.device)

    def _last(self, is_last: bool) -> AbstractContextManager[None]:
        """Whether gradients are summed after this micro-batch: always where they are cut (ZeRO 2 and 3)."""
        objective: object = self.modules[0]
        if isinstance(objective, DistributedDataParallel):
            return nullcontext() if is_last else objective.no_sync()
        if isinstance(objective, FSDPModule) and self.mesh.layout.zero == 1:
            objective.set_requires_gradient_sync(is_last)
            objective.set_reshard_after_backward(is_last)
            objective.set_is_last_backward(is_last)
        return nullcontext()

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Sum what nobody else does."""
        if self.mesh.is_alone:
            return
        self._sum_at_rest()
        if self.mesh.size("tensor") > 1:
            group = self.mesh.group("tensor")
            _sum_flat([local_tensor(p.grad) for p in self._whole_over_tensor() if p.grad is not None], group)
        if self.mesh.ends is not None and self.model.config.tied_head:
            _sum_flat(
                [local_tensor(g) for g in [self.model.embedding.weight.grad] if g is not None], self.mesh.ends
            )
        amaxes = [m.amax for m in self.model.modules() if isinstance(m, AmaxHistory)]
        if amaxes:
            model_group = torch.stack(amaxes)
            with comm_tag("amax"):
                dist.all_reduce(model_group, dist.ReduceOp.MAX, self.mesh.group("stage"))
            for amax, of_all in zip(amaxes, model_group, strict=True):
                amax.copy_(of_all)

    def _sum_at_rest(self) -> None:
        """Gradients in narrow numbers: of whole weights over `tensor`, over `data` where FSDP does not."""
        wires = wire_formats(self.model)
        narrow = {p: g for p in self.model.parameters() if (g := state_of(p).gradient) is not None}
        for direction in ("tensor",) if self.mesh.layout.is_cut else ("data", "tensor"):
            if self.mesh.size(direction) > 1:
                group = self.mesh.group(direction)
                some = [p for p in narrow if direction == "data" or group not in _groups(p)]
                all_reduce_gradient_states([narrow[p] for p in some], [wires[p] for p in some], group)

    def after_update(self) -> None:
        """The weights have changed: agree on the scales that they travel with."""
        if self.mesh.layout.is_cut:
            renew_gather_scales(self.model)

    def _whole_over_tensor(self) -> Iterator[nn.Parameter]:
        """Parameters of which each process of `tensor` has all."""
        group = self.mesh.group("tensor")
        for p in self.model.parameters():
            if group not in _groups(p):
                yield p

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each of some numbers summed over all processes, in float64."""
        if self.mesh.is_alone:
            return list(numbers)
        model_group = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(model_group)
        return model_group.tolist()

    @property
    def rank(self) -> int:
        """Of this process among all."""
        return 0 if self.mesh.is_alone else dist.get_rank()

    def gather(self, value: Any) -> list[Any]:
        """What each process has, in the order of their ranks."""
        if self.mesh.is_alone:
            return [value]
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, value)
        return every

    def sum_over_data(self, count: int) -> int:
        """A count summed over the processes that meet sequences of their own."""
        if self.mesh.layout.data == 1:
            return count
        model_group = torch.tensor(count, device=self.device)
        for group in self.mesh.groups("replicate", "shard"):
            dist.all_reduce(model_group, group=group)
        return int(model_group)

    def share_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """What one process found not finite in its gradients, all shall know of: scales stay equal."""
        if not self.mesh.is_alone:
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX)


def _groups(p: torch.Tensor) -> list[dist.ProcessGroup]:
    """The groups that hold shards of a parameter."""
    shard = state_of(p).shard
    assert shard is not None, "a parameter that `parallelize` has not placed"
    return shard.groups


def _sum_flat(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All of them in one collective."""
    if not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    with comm_tag("reduce"):
        dist.all_reduce(flat, group=group)
    for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(summed.view_as(g))

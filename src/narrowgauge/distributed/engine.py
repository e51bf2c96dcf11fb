"""One optimizer step over all processes, but for the update: forward, backward, and what has to be summed.

Where gradients come together:

    over `data`       by DDP or FSDP2, beside the backward pass
    over `tensor`     here, for weights that are whole on each of its processes: these saw different tokens
    histories         largest magnitudes of delayed scales, all layers in one collective
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.data import Batch
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.models import Transformer
from narrowgauge.nn.delayed import History
from narrowgauge.optim import Optimizer, Together, local
from narrowgauge.quantization import Part


class MicroBatch(NamedTuple):
    """Some sequences of a step's batch."""

    first: int  # the number of the first of them in the batch
    batch: Batch


class Engine:
    """A model on the processes of a mesh; of a mesh of one, just the model."""

    def __init__(self, model: Transformer, objective: nn.Module | Callable[..., torch.Tensor], mesh: Mesh):
        self.model, self.objective, self.mesh = model, objective, mesh

    def attach(self, optimizer: Optimizer) -> None:
        """Tell an optimizer who holds the parameters with it."""
        if not self.mesh.is_alone:
            assert dist.group.WORLD is not None
            optimizer.together = Together(dist.group.WORLD, self.mesh.size("stage"))

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        begin: Callable[[int], None],
        loss_of: Callable[[Batch], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """Forward and backward of this process's micro-batches; the sum of what `loss_of` returned, detached.

        `begin(i)` is called before the forward pass of the i-th.
        """
        total = None
        for i, micro_batch in enumerate(micro_batches):
            begin(i)
            with self._last(i == len(micro_batches) - 1):
                loss = loss_of(micro_batch.batch)
                backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _last(self, is_last: bool) -> AbstractContextManager[None]:
        """Whether gradients are summed after this micro-batch: always where they are cut (ZeRO 2 and 3)."""
        if isinstance(self.objective, DistributedDataParallel):
            return nullcontext() if is_last else self.objective.no_sync()
        objective: object = self.objective
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
        if self.mesh.size("tensor") > 1:
            _sum_flat([local(p.grad) for p in self._whole_over_tensor() if p.grad is not None], self.mesh)
        amaxes = [m.amax for m in self.model.modules() if isinstance(m, History)]
        if amaxes:
            together = torch.stack(amaxes)
            dist.all_reduce(together, dist.ReduceOp.MAX, self.mesh.group("stage"))
            for amax, of_all in zip(amaxes, together, strict=True):
                amax.copy_(of_all)

    def _whole_over_tensor(self) -> Iterator[nn.Parameter]:
        """Parameters of which each process of `tensor` has all."""
        group = self.mesh.group("tensor")
        for p in self.model.parameters():
            part: Part = p.part  # type: ignore[attr-defined]
            if group not in part.groups:
                yield p

    def sum(self, number: float) -> float:
        """A number summed over all processes, in float64."""
        if self.mesh.is_alone:
            return number
        together = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(together)
        return together.item()

    def sum_over_data(self, count: int) -> int:
        """A count summed over the processes that meet sequences of their own."""
        if self.mesh.layout.data == 1:
            return count
        together = torch.tensor(count, device=self.device)
        for group in self.mesh.groups("replicate", "shard"):
            dist.all_reduce(together, group=group)
        return int(together)

    def share_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """What one process found not finite in its gradients, all shall know of: scales stay equal."""
        if not self.mesh.is_alone:
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device


def _sum_flat(gradients: list[torch.Tensor], mesh: Mesh) -> None:
    """All of them in one collective."""
    if not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=mesh.group("tensor"))
    for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(summed.view_as(g))

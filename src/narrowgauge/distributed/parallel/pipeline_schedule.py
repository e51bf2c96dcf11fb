"""The order in which the stages of a pipeline work: torch's schedules, 1F1B and interleaved 1F1B."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleLoopedBFS
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.parallel.pipeline_stage import Stage, StageInput
from narrowgauge.models import Transformer


class Pipeline:
    """The stages of this process, and how they run."""

    def __init__(
        self, model: Transformer, modules: list[nn.Module], mesh: Mesh, device: torch.device
    ) -> None:
        """`modules` are this process's stages, in their order, wrapped by data parallelism or not."""
        self.model, self.modules, self.mesh, self.device = model, modules, mesh, device
        self._schedules: dict[tuple[Any, ...], Any] = {}

    def run(self, work: StageInput, with_backward: bool) -> torch.Tensor:
        """All micro-batches, forward and, if wanted, back; the sum of the losses, 0 but on the last stage."""
        stages = [_stage_of(module) for module in self.modules]
        for stage in stages:
            stage.start(work)
        first = work.micro_batches[0].batch.x_BT
        schedule = self._schedule(tuple(first.shape), len(work.micro_batches), with_backward)
        ids = (
            [torch.cat([m.batch.x_BT for m in work.micro_batches]).to(self.device)]
            if stages[0].is_first
            else []
        )
        ends = {}
        if stages[-1].is_last:  # what the loss is compared with the stage itself knows
            ends["target"] = torch.zeros(len(work.micro_batches), device=self.device)
        if with_backward:
            schedule.step(*ids, **ends)
        else:
            with torch.no_grad():
                schedule.eval(*ids, **ends)
        return work.total

    def _schedule(self, shape: tuple[int, ...], micro_batches: int, with_backward: bool) -> Any:
        key = (shape, micro_batches, with_backward)
        if key not in self._schedules:
            stages = [self._as_torch_has_it(module, shape) for module in self.modules]
            kind: Any = Schedule1F1B if with_backward else ScheduleGPipe
            if len(stages) > 1:
                kind = ScheduleInterleaved1F1B if with_backward else ScheduleLoopedBFS
            some = stages if len(stages) > 1 else stages[0]
            self._schedules[key] = kind(some, micro_batches, loss_fn=_first, scale_grads=False)
        return self._schedules[key]

    def _as_torch_has_it(self, module: nn.Module, shape: tuple[int, ...]) -> PipelineStage:
        stage, (B, T) = _stage_of(module), shape
        model = self.model
        wide = torch.promote_types(torch.float32, model.compute_dtype)  # of the residual stream
        size = (B, T // model.share[1], model.config.dim)
        stream = torch.empty(size, dtype=wide, device="meta", requires_grad=True)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        return PipelineStage(
            module,
            stage.number,
            self.mesh.layout.stages,
            self.device,
            input_args=(ids if stage.is_first else stream,),
            output_args=(torch.empty(1, device="meta", requires_grad=True) if stage.is_last else stream,),
            group=self.mesh.group("pipeline"),
        )


def _stage_of(module: nn.Module) -> Stage:
    stage = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(stage, Stage)
    return stage


def _first(loss_1: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The last stage's output is the loss already."""
    return loss_1[0]

"""Runs the stages of a pipeline in the order of torch's schedules: 1F1B and interleaved 1F1B."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleLoopedBFS
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.system.collectives import comm_tag
from narrowgauge.trainer.distributed.pipeline_stage import Stage, StageInput
from narrowgauge.trainer.models import Transformer


class Pipeline:
    """The stages of this process, and their schedules."""

    def __init__(
        self, model: Transformer, modules: list[nn.Module], mesh: Mesh, device: torch.device
    ) -> None:
        """Make a pipeline of this process's stages, `modules`, in their order; DDP or FSDP may wrap them."""
        self.model, self.modules, self.mesh, self.device = model, modules, mesh, device
        self._schedules: dict[tuple[Any, ...], Any] = {}

    def run(self, stage_input: StageInput, with_backward: bool) -> torch.Tensor:
        """Run the forward and, if wanted, the backward passes of all micro-batches.

        Returns:
            The sum of the losses, 0-dim; 0 except on the last stage.
        """
        stages = [_unwrapped(module) for module in self.modules]
        for stage in stages:
            stage.start(stage_input)
        batches = [m.batch.x_BT for m in stage_input.micro_batches]
        schedule = self._schedule(tuple(batches[0].shape), len(batches), with_backward)
        ids = [torch.cat(batches).to(self.device)] if stages[0].is_first else []
        options = {}
        if stages[-1].is_last:  # the stage itself has the labels that the loss needs
            options["target"] = torch.zeros(len(batches), device=self.device)
        if with_backward:
            schedule.step(*ids, **options)
        else:
            with torch.no_grad():
                schedule.eval(*ids, **options)
        return stage_input.total

    def _schedule(self, shape: tuple[int, ...], micro_batches: int, with_backward: bool) -> Any:
        key = (shape, micro_batches, with_backward)
        if key not in self._schedules:
            stages = [self._torch_stage(module, shape) for module in self.modules]
            schedule_class: Any = Schedule1F1B if with_backward else ScheduleGPipe
            if len(stages) > 1:
                schedule_class = ScheduleInterleaved1F1B if with_backward else ScheduleLoopedBFS
            one_or_all = stages if len(stages) > 1 else stages[0]
            self._schedules[key] = schedule_class(
                one_or_all, micro_batches, loss_fn=_first, scale_grads=False
            )
        return self._schedules[key]

    def _torch_stage(self, module: nn.Module, shape: tuple[int, ...]) -> PipelineStage:
        """Wrap a stage for torch's schedules, with examples of its input and output."""
        stage, (B, T) = _unwrapped(module), shape
        model = self.model
        size = (B, T // model.share[1], model.config.dim)
        stream = torch.empty(size, dtype=model.stream_dtype, device="meta", requires_grad=True)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        return _TorchStage(
            module,
            stage.number,
            self.mesh.parallel_dims.stages,
            self.device,
            input_args=(ids if stage.is_first else stream,),
            output_args=(torch.empty(1, device="meta", requires_grad=True) if stage.is_last else stream,),
            group=self.mesh.group("pipeline"),
        )


class _TorchStage(PipelineStage):
    """A stage whose sums of gradients, which FSDP leaves to the schedule, are tagged as such."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum the gradients of FSDP after the last micro-batch."""
        with comm_tag("reduce"):
            super().perform_reduce_grad(grad_scale_factor)


def _unwrapped(module: nn.Module) -> Stage:
    stage = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(stage, Stage)
    return stage


def _first(loss_1: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The last stage's output, which is already the loss."""
    return loss_1[0]

"""Pipeline parallelism: the stages of a model, which of them this process has, and torch's schedules.

Each process of `pipeline` has `chunks` stages: process p of P has the stages p, P + p, 2P + p ...
(1F1B and interleaved 1F1B, arXiv 2104.04473). The first stage has the embedding; the last has the norm, the
head and the loss. Both have a copy of a tied embedding; `Engine` sums the gradients of both, so that they
stay equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleLoopedBFS
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.kernels.residual import total
from narrowgauge.system.collectives import comm_tag
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.models import Transformer, objective_of


class MicroBatch(NamedTuple):
    """Some sequences of a step's batch, and the weight of their mean loss in the loss of the step."""

    first: int  # the number of the first sequence in the batch
    batch: Batch
    weight: float


@dataclass
class StageInput:
    """Inputs of a process's stages in a step, apart from the tensors that stages send each other."""

    micro_batches: Sequence[MicroBatch]
    total: torch.Tensor  # the sum of the losses so far, as `Transformer.loss` returns them
    # `begin(i)` is called before each forward pass of the i-th micro-batch
    begin: Callable[[int], None] = lambda i: None
    # maps a loss to the value that the backward pass starts from
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
    current: int = -1  # the micro-batch that was begun last; -1 before the first

    def enter(self, i: int) -> None:
        """Begin the i-th micro-batch, unless it is the current one."""
        if i != self.current:
            self.begin(i)
            self.current = i


def stages_of(mesh: Mesh) -> list[int]:
    """The stages of this process."""
    return list(range(mesh.index("pipeline"), mesh.parallel_dims.stages, mesh.size("pipeline")))


def blocks_of_stage(stage: int, stages: int, layers: int) -> range:
    """The blocks of one of `stages` stages."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def keep_stages(model: Transformer, mesh: Mesh) -> None:
    """Remove from a model the layers of other processes' stages."""
    stages, last = stages_of(mesh), mesh.parallel_dims.stages - 1
    if last == 0:
        return
    layers = len(model.blocks)
    kept = {i for stage in stages for i in blocks_of_stage(stage, last + 1, layers)}
    for i in range(layers):
        if i not in kept:
            model.blocks[i] = nn.Identity()
    if 0 not in stages:
        model.position_embedding = None  # type: ignore[assignment]
        if last not in stages or not model.config.tied_head:
            model.embedding = None  # type: ignore[assignment]
    if last not in stages:
        model.norm = model.head = None  # type: ignore[assignment]


class Stage(nn.Module):
    """The layers of one stage: token ids or a residual stream in, a residual stream or the loss out.

    Torch's schedules pass only tensors to a stage. Micro-batches arrive in order, so the stage counts them
    and reads positions and targets from `stage_input`.
    """

    stage_input: StageInput

    def __init__(self, model: Transformer, number: int, stages: int) -> None:
        super().__init__()
        self.number, self.is_first, self.is_last = number, number == 0, number == stages - 1
        self.model_ref = [model]  # in a list, so that layers of other stages are not registered here
        self.blocks = nn.ModuleList(
            model.blocks[i] for i in blocks_of_stage(number, stages, len(model.blocks))
        )
        if self.is_first or (self.is_last and model.config.tied_head):
            self.embedding = model.embedding
        if self.is_first:
            self.position_embedding = getattr(model, "position_embedding", None)
        if self.is_last:
            self.norm, self.head = model.norm, model.head
        self.count = 0

    def start(self, stage_input: StageInput) -> None:
        """Begin a step."""
        self.stage_input, self.count = stage_input, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next micro-batch: ids (B, T) or the stream (B, T, D), to the stream or the loss (1,)."""
        model, i = self.model_ref[0], self.count
        self.count += 1
        self.stage_input.enter(i)
        micro_batch = self.stage_input.micro_batches[i]
        batch = micro_batch.batch.to(x.device)
        if self.is_first:
            x = model.embed(batch.x_BT, batch.position_BT)
        blocks = [partial(self._run_block, i, block) for block in self.blocks]
        stream = model.through_blocks(x, 0, batch.x_BT.shape[1], batch.position_BT, blocks=blocks)
        if not self.is_last:
            return total(*stream)
        targets = batch.targets if batch.ignores else None
        loss = model.loss_after(model.norm(*stream), batch.y_BT, targets) * micro_batch.weight
        self.stage_input.total += loss.detach()
        return torch.stack([self.stage_input.scale(objective_of(loss))])

    def _run_block(
        self, i: int, block: nn.Module, *inputs: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one block for one micro-batch; a recomputation runs after later micro-batches have begun."""
        if (recomputed := options.get("recomputed")) is not None:  # a part of the block
            options["recomputed"] = lambda function, *of: recomputed(partial(self._part, i, function), *of)
        pair: tuple[torch.Tensor, torch.Tensor | None] = self._part(i, block, *inputs, **options)
        return pair

    def _part(self, i: int, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """A block, or a part of it, for one micro-batch."""
        self.stage_input.enter(i)
        return function(*inputs, **options)


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
                one_or_all,
                micro_batches,
                loss_fn=lambda loss_1, _: loss_1[0],  # the last stage's output is already the loss
                scale_grads=False,
            )
        return self._schedules[key]

    def _torch_stage(self, module: nn.Module, shape: tuple[int, ...]) -> PipelineStage:
        """Wrap a stage for torch's schedules, with examples of its input and output."""
        stage, model = _unwrapped(module), self.model
        size = (shape[0], shape[1] // model.share[1], model.config.dim)
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

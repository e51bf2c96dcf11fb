"""Pipeline parallelism: the stages of a model, and which of them this process has.

Each process of `pipeline` has `chunks` stages: process p of P has the stages p, P + p, 2P + p ...
(interleaved 1F1B, arXiv 2104.04473). The first stage has the embedding; the last has the norm, the head and
the loss. Both have a copy of a tied embedding; `Engine` sums the gradients of both, so that they stay equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.kernels.residual import total
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
    begin: Callable[[int], None]  # `begin(i)` is called before each forward pass of the i-th micro-batch
    # maps a loss to the value that the backward pass starts from
    scale: Callable[[torch.Tensor], torch.Tensor]
    total: torch.Tensor  # the sum of the losses so far, as `Transformer.loss` returns them
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
        """Forward pass of the next micro-batch: token ids (B, T) in the first stage, else the residual stream
        (B, T, D), to the residual stream or, in the last stage, the loss (1,)."""
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
        self.stage_input.enter(i)
        if (recomputed := options.get("recomputed")) is not None:  # a part of the block
            options["recomputed"] = lambda function, *of: recomputed(partial(self._again, i, function), *of)
        pair: tuple[torch.Tensor, torch.Tensor | None] = block(*inputs, **options)
        return pair

    def _again(self, i: int, function: Callable[..., Any], *inputs: Any) -> Any:
        """A part of a block for one micro-batch, as `_run_block`."""
        self.stage_input.enter(i)
        return function(*inputs)

"""Which layers are whose: pipeline parallelism.

The layers are cut into as many stages as there are processes in `pipeline`, times the chunks that each has;
process p of P has the stages p, P + p, 2P + p ... (interleaved 1F1B, arXiv 2104.04473). The first stage has
the embedding, the last the norm, the head and the loss. A tied head is an embedding that stands on both: each
has its own copy, and their gradients are summed (`Engine`), so that the copies stay equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from narrowgauge.data import Batch
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.models import Transformer


class MicroBatch(NamedTuple):
    """Some sequences of a step's batch, and the weight of their mean loss in the step's."""

    first: int  # the number of the first sequence in the batch
    batch: Batch
    weight: float


@dataclass
class StageInput:
    """What the stages of a process have to do in a step, beside what travels between them.

    `begin(i)` is called before each forward pass of the i-th micro-batch, and `scale` makes of its loss what
    the backward pass starts from. `total` is the sum of the losses so far, `now` the last that was begun.
    """

    micro_batches: Sequence[MicroBatch]
    begin: Callable[[int], None]
    scale: Callable[[torch.Tensor], torch.Tensor]
    total: torch.Tensor
    now: int = -1

    def enter(self, i: int) -> None:
        """Be in the i-th micro-batch, wherever the last forward pass was."""
        if i != self.now:
            self.begin(i)
            self.now = i


def stages_of(mesh: Mesh) -> list[int]:
    """The stages of this process."""
    return list(range(mesh.index("pipeline"), mesh.layout.stages, mesh.size("pipeline")))


def blocks_of_stage(stage: int, stages: int, layers: int) -> range:
    """Which blocks a stage has."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def keep_stages(model: Transformer, mesh: Mesh) -> None:
    """Leave a model the layers of this process's stages."""
    own, last = stages_of(mesh), mesh.layout.stages - 1
    if last == 0:
        return
    layers = len(model.blocks)
    kept = {i for stage in own for i in blocks_of_stage(stage, last + 1, layers)}
    for i in range(layers):
        if i not in kept:
            model.blocks[i] = nn.Identity()
    if 0 not in own:
        model.position_embedding = None  # type: ignore[assignment]
        if last not in own or not model.config.tied_head:
            model.embedding = None  # type: ignore[assignment]
    if last not in own:
        model.norm = model.head = None  # type: ignore[assignment]


class Stage(nn.Module):
    """The layers of one stage: ids or a residual stream in, a residual stream or the loss out.

    Micro-batches come in their order, so the stage knows by counting which one it has; what it needs of it
    beside its input is in `work`.
    """

    work: StageInput

    def __init__(self, model: Transformer, number: int, stages: int) -> None:
        super().__init__()
        self.number, self.is_first, self.is_last = number, number == 0, number == stages - 1
        self.of = [model]  # in a list, so that the layers of other stages are not this module's
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

    def start(self, work: StageInput) -> None:
        """Begin a step."""
        self.work, self.count = work, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next micro-batch."""
        model, i = self.of[0], self.count
        self.count += 1
        self.work.enter(i)
        micro_batch = self.work.micro_batches[i]
        batch = micro_batch.batch.to(x.device)
        if self.is_first:
            x = model.embed(batch.x_BT, batch.position_BT)
        blocks = [partial(self._through, i, block) for block in self.blocks]
        x = model.through_blocks(x, 0, batch.x_BT.shape[1], batch.position_BT, blocks=blocks)
        if not self.is_last:
            return x
        targets = batch.targets if batch.ignores else None
        loss = model.loss_after(model.norm(x), batch.y_BT, targets) * micro_batch.weight
        self.work.total += loss.detach()
        return torch.stack([self.work.scale(loss)])

    def _through(self, i: int, block: nn.Module, *inputs: torch.Tensor | None, **more: Any) -> torch.Tensor:
        """A block's part of a micro-batch; where it is recomputed, later ones have been begun since."""
        self.work.enter(i)
        return block(*inputs, **more)

"""Simulates one rank of a pipeline on meta tensors: 1F1B and interleaved 1F1B.

Torch's schedules read the tensors that they receive from other ranks, which is impossible on the meta device.
The order is the same: forward passes until the first gradient could have returned, then one backward and one
forward pass in turn, then the remaining backward passes (arXiv 2104.04473). So a rank holds the same tensors
at the same time as in a real run.
"""

from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.collectives import comm_tag
from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.pipeline_stage import StageInput
from narrowgauge.models import Transformer


class FakePipeline:
    """The stages of this process and their order."""

    def __init__(self, model: Transformer, modules: list[Any], mesh: Mesh) -> None:
        """Make a pipeline of this process's stages, `modules`, in order."""
        self.model, self.modules, self.mesh = model, modules, mesh
        self.live: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, stage_input: StageInput, with_backward: bool) -> torch.Tensor:
        """Run all micro-batches as `Pipeline.run` does, always with backward passes."""
        dims, count = self.mesh.parallel_dims, len(stage_input.micro_batches)
        for stage in (getattr(module, "module", module) for module in self.modules):
            stage.start(stage_input)
        forward = _order(count, dims.pipeline, dims.chunks, backwards=False)
        backward = _order(count, dims.pipeline, dims.chunks, backwards=True)
        ahead = dims.pipeline - self.mesh.index("pipeline") - 1
        if dims.chunks > 1:
            ahead = 2 * ahead + (dims.chunks - 1) * dims.pipeline
        ahead = min(ahead, len(forward))
        for at, (chunk, i) in enumerate(forward):
            self._forward(chunk, i, stage_input)
            if at >= ahead:
                self._backward(*backward[at - ahead])
        for chunk, i in backward[len(forward) - ahead :]:
            self._backward(chunk, i)
        return stage_input.total

    def _forward(self, chunk: int, i: int, stage_input: StageInput) -> None:
        stage = getattr(self.modules[chunk], "module", self.modules[chunk])
        x_BT = stage_input.micro_batches[i].batch.x_BT
        x = x_BT
        if not stage.is_first:
            size = (len(x_BT), x_BT.shape[1] // self.model.share[1], self.model.config.dim)
            x = torch.empty(size, dtype=self.model.stream_dtype, device="meta", requires_grad=True)
        out = self.modules[chunk](x)
        self.live[chunk, i] = x, out
        if not stage.is_last:
            self._send(out, 1)

    def _backward(self, chunk: int, i: int) -> None:
        x, out = self.live.pop((chunk, i))
        torch.autograd.backward([out], [torch.empty_like(out)])
        if x.grad is not None:
            self._send(x.grad, -1)

    def _send(self, x: torch.Tensor, by: int) -> None:
        """Send a tensor to the rank `by` places further in the pipeline."""
        group = self.mesh.group("pipeline")
        ranks = dist.get_process_group_ranks(group)
        with comm_tag("activations"):
            dist.send(x.detach(), ranks[(self.mesh.index("pipeline") + by) % len(ranks)], group=group)


def _order(count: int, processes: int, chunks: int, backwards: bool) -> list[tuple[int, int]]:
    """The order of (chunk, micro-batch): each chunk in turn runs one micro-batch for each process."""
    turn = list(range(chunks))[:: -1 if backwards else 1]
    groups = [range(at, min(at + processes, count)) for at in range(0, count, processes)]
    return [(chunk, i) for group in groups for chunk in turn for i in group]

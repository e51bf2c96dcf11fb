"""One process of a pipeline whose other processes are not there: 1F1B, and interleaved, without numbers.

Torch's schedules ask their neighbours and read the answer, which the meta device cannot. The order is theirs:
a process goes forward until the first loss could have come back to it, then one backward and one forward in
turn, then the backwards that are left (arXiv 2104.04473). What it holds meanwhile is what a run holds.
"""

from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.distributed.mesh import Mesh
from narrowgauge.distributed.parallel.pipeline_stage import StageInput
from narrowgauge.models import Transformer
from narrowgauge.quantization.purpose import comm_tag


class FakePipeline:
    """The stages of this process, and how they run."""

    def __init__(self, model: Transformer, modules: list[Any], mesh: Mesh) -> None:
        """`modules` are this process's stages, in their order."""
        self.model, self.modules, self.mesh = model, modules, mesh
        self.live: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, work: StageInput, with_backward: bool) -> torch.Tensor:
        """All micro-batches, forward and back; `with_backward` is for the form."""
        layout, place, count = self.mesh.layout, self.mesh.index("pipeline"), len(work.micro_batches)
        stages = [getattr(module, "module", module) for module in self.modules]
        for stage in stages:
            stage.start(work)
        forward = _order(count, layout.pipeline, layout.chunks, backwards=False)
        back = _order(count, layout.pipeline, layout.chunks, backwards=True)
        ahead = layout.pipeline - place - 1
        if layout.chunks > 1:
            ahead = 2 * ahead + (layout.chunks - 1) * layout.pipeline
        ahead = min(ahead, len(forward))
        for at, each in enumerate(forward):
            self._forward(*each, work)
            if at >= ahead:
                self._backward(*back[at - ahead])
        for each in back[len(forward) - ahead :]:
            self._backward(*each)
        return work.total

    def _forward(self, chunk: int, i: int, work: StageInput) -> None:
        stage = getattr(self.modules[chunk], "module", self.modules[chunk])
        x_BT = work.micro_batches[i].batch.x_BT
        x = x_BT
        if not stage.is_first:
            wide = torch.promote_types(torch.float32, self.model.compute_dtype)
            size = (len(x_BT), x_BT.shape[1] // self.model.share[1], self.model.config.dim)
            x = torch.empty(size, dtype=wide, device="meta", requires_grad=True)
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
        group = self.mesh.group("pipeline")
        ranks = dist.get_process_group_ranks(group)
        with comm_tag("activations"):
            dist.send(x.detach(), ranks[(self.mesh.index("pipeline") + by) % len(ranks)], group=group)


def _order(count: int, processes: int, chunks: int, backwards: bool) -> list[tuple[int, int]]:
    """(chunk, micro-batch) one after the other: as many micro-batches as processes for each chunk in turn."""
    turn = list(range(chunks))[:: -1 if backwards else 1]
    groups = [range(at, min(at + processes, count)) for at in range(0, count, processes)]
    return [(chunk, i) for group in groups for chunk in turn for i in group]

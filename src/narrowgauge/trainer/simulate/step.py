"""Runs an optimizer step on meta tensors, with the trainer's own code, under one recorder.

Meta tensors have shapes and no data, and collectives with the other processes of a mesh do nothing
(`torch_compat.fake_world`); FSDP2, DDP and pipelines are torch's own. So the step of one of thousands of
processes runs here, and no formula can fall behind its code. Tensors are not chunked, as on a GPU. Inside
`devices.imagine(gpu)` the step runs that GPU's kernels and native GEMMs.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.nn import Gauges
from narrowgauge.system.devices import Device, imagine
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import fake_world
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.simulate.memory import Memory, measured
from narrowgauge.trainer.simulate.recorder import Recorder
from narrowgauge.trainer.training.config.config import Config
from narrowgauge.trainer.training.step.trainer import Trainer

SINGLE = ParallelDims()
UPDATE = "update"  # the phase from the last backward pass to the end of the step
_GPU_ALLOCATION = 512  # bytes; torch's allocator rounds up to it

Sent = Counter[tuple[str, tuple[int, ...]]]  # bytes by (purpose, ranks of the group)


@dataclass
class SimulatedStep:
    """The record of one optimizer step of one process.

    Attributes:
        recorder: the record.
        memory: the bytes alive by class; None of a counted step.
        state_bytes: bytes on the device between steps.
        sent: the bytes that the process has sent at the start of the step, at the start of each micro-batch,
            and at the end of the step.
    """

    recorder: Recorder
    memory: Memory | None = None
    state_bytes: int = 0
    sent: list[Sent] = field(default_factory=list)


def phase_of(micro_batch: int) -> str:
    """The phase of a micro-batch, from 0."""
    return f"micro-batch {micro_batch}"


def simulate_step(
    config: Config,
    micro_batches: int,
    parallel_dims: ParallelDims = SINGLE,
    rank: int = 0,
    count_on: Device | None = None,
) -> SimulatedStep:
    """Run a step of a few micro-batches on meta tensors.

    Args:
        config: the configuration; its batch is replaced.
        micro_batches: the number of micro-batches of the process.
        parallel_dims: the mesh.
        rank: the process that is simulated.
        count_on: the GPU whose operations are counted, and whose peak includes what exists before the step;
            None if only memory and traffic are asked for.
    """
    t, guard, meta = config.training, config.guard, torch.device("meta")
    batch_size = micro_batches * parallel_dims.data * t.micro_batch_size
    few = {
        "training": t.model_copy(update={"batch_size": batch_size}),
        "guard": guard.model_copy(update={"replay_every": 0}),
    }
    size = (t.micro_batch_size, config.data.sequence_length)
    is_counted = count_on is not None
    recorder = Recorder(allocation=_GPU_ALLOCATION if is_counted else 1)
    with ExitStack() as stack:
        if gc.isenabled():  # a full collection takes as long as hundreds of operations
            gc.disable()
            stack.callback(gc.enable)
        mesh = stack.enter_context(simulated_mesh(parallel_dims, rank))
        if is_counted:
            stack.enter_context(imagine(count_on, recorder.on_launch))
            stack.enter_context(recorder.watching())
        trainer = Trainer.begin(config.model_copy(update=few), meta, mesh)
        x_BT = torch.empty(size, dtype=torch.long, device=meta)
        batch = Batch(x_BT, x_BT, x_BT.numel(), x_BT if config.data.separate_documents else None)
        step = SimulatedStep(recorder)
        if is_counted:
            recorder.live.begin_peak()
        else:  # what exists by now belongs to no step
            stack.enter_context(recorder)
        step.sent.append(recorder.traffic.by_ranks.copy())
        observer = _Observer(step, trainer, is_counted)
        trainer.train_step(iter([batch] * micro_batches), observer.after_forward, cast(Gauges, observer))
    return step


@contextmanager
def simulated_mesh(parallel_dims: ParallelDims, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of one rank of a simulated run, on the meta device.

    Raises:
        UserError: this process is already in a process group.
    """
    if parallel_dims.size > 1 and dist.is_initialized():
        raise UserError(
            "several processes can be simulated only outside a process group, and this process is in one; "
            "use `narrowgauge plan` instead"
        )
    with fake_world(rank, parallel_dims.size) if parallel_dims.size > 1 else nullcontext():
        yield Mesh(parallel_dims, torch.device("meta"))


class _Observer:
    """Informs the recorder which phase of the step begins; it takes the place of gauges."""

    def __init__(self, step: SimulatedStep, trainer: Trainer, is_counted: bool) -> None:
        self.step, self.trainer, self.is_counted, self.saved = step, trainer, is_counted, 0

    def begin_micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch."""
        self._begin(phase_of(len(self.step.sent) - 1))
        self.step.sent.append(self.step.recorder.traffic.by_ranks.copy())

    def after_forward(self, loss: torch.Tensor) -> None:
        """Record the bytes that the first forward pass keeps for the backward pass."""
        live = self.step.recorder.live
        live.update_all()
        self.saved = self.saved or live.alive

    def after_backward(self) -> None:
        """Begin what follows the last backward pass."""
        self._begin(UPDATE)

    def after_step(self) -> None:
        """End the step."""
        self._begin("")
        recorder = self.step.recorder
        self.step.sent.append(recorder.traffic.by_ranks.copy())
        memory = measured(self.trainer, self.saved, recorder.live.peak)
        self.step.memory, self.step.state_bytes = None if self.is_counted else memory, memory.state

    def _begin(self, phase: str) -> None:
        self.step.recorder.phase = phase if self.is_counted else ""

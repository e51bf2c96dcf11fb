"""Estimates memory and traffic of a step by running it on torch's meta device.

Meta tensors have shapes and no data, and the processes of the mesh are simulated, so there is no formula that
could fall behind the code. Every operation works on unchunked tensors, as on a GPU. Whose memory it is says
the caller: inside of `devices.imagine` the step takes that GPU's path, with its kernels and native products.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.data import Batch
from narrowgauge.distributed import CommCounter, MicroBatch, ParallelDims, fake_mesh
from narrowgauge.models import count_parameters
from narrowgauge.training.config.config import Config
from narrowgauge.training.monitor.memory import Memory, measured
from narrowgauge.training.monitor.memory_tracker import MemoryTracker
from narrowgauge.training.step.build_model import go_to
from narrowgauge.training.step.trainer import Trainer

ALONE = ParallelDims()


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step of one process."""

    memory: Memory
    sent: Mapping[tuple[str, tuple[int, ...]], int]  # bytes by (purpose, ranks of the group)


def estimate_memory(config: Config, parallel_dims: ParallelDims = ALONE) -> Memory:
    """The expected memory of a step on the process that needs most."""
    return estimate_step(config, parallel_dims).memory


def estimate_step(config: Config, parallel_dims: ParallelDims = ALONE) -> StepEstimate:
    """The expected step of the process that needs most: in a pipeline the first or the last, else any.

    A model of many equal blocks is estimated twice with a few blocks, and extrapolated linearly.
    """
    model, t = config.spec.model, config.training
    unit = parallel_dims.stages * (t.recompute_every if t.recompute else 1)
    if model.layers <= 4 * unit or model.layers % unit:
        return _heaviest(config, parallel_dims)
    further, parameters = (model.layers - 4 * unit) / (2 * unit), count_parameters(model)
    few, more = (with_layers(config, n * unit) for n in (2, 4))
    steps = [  # extrapolated per process: with few layers another process may be the heaviest
        _extrapolate(_step(few, parallel_dims, rank), _step(more, parallel_dims, rank), further, parameters)
        for rank in _first_and_last_rank(parallel_dims)
    ]
    return max(steps, key=lambda step: step.memory.peak)


def _heaviest(config: Config, parallel_dims: ParallelDims) -> StepEstimate:
    steps = (_step(config, parallel_dims, rank) for rank in _first_and_last_rank(parallel_dims))
    return max(steps, key=lambda step: step.memory.peak)


def _first_and_last_rank(parallel_dims: ParallelDims) -> list[int]:
    """A rank of the first stage and one of the last; without a pipeline all ranks are alike."""
    return (
        [0]
        if parallel_dims.pipeline == 1
        else [0, parallel_dims.size - parallel_dims.size // parallel_dims.pipeline]
    )


def with_layers(config: Config, layers: int) -> Config:
    """The configuration with another number of blocks."""
    return config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})


def _extrapolate(few: StepEstimate, more: StepEstimate, further: float, parameters: int) -> StepEstimate:
    """Linear extrapolation: `more`, plus `further` times the difference from `few`."""

    def extrapolated(a: Mapping[Any, int], b: Mapping[Any, int]) -> dict[Any, int]:
        return {key: max(0, round(size + further * (size - a.get(key, 0)))) for key, size in b.items()}

    old, new = few.memory, more.memory
    return StepEstimate(
        Memory(extrapolated(old.device, new.device), extrapolated(old.host, new.host), parameters),
        extrapolated(few.sent, more.sent),
    )


def _step(config: Config, parallel_dims: ParallelDims, rank: int) -> StepEstimate:
    """A step of one rank with only as many micro-batches as the extrapolation to all of them needs."""
    t, meta = config.training, torch.device("meta")
    count = t.batch_size // (parallel_dims.data * t.micro_batch_size)
    simulated = min(count, 2 * parallel_dims.pipeline if parallel_dims.pipeline > 1 else 2)
    x_BT = torch.zeros(t.micro_batch_size, config.data.sequence_length, dtype=torch.long, device=meta)
    batch = Batch(x_BT, x_BT, x_BT.numel(), x_BT if config.data.separate_documents else None)
    sent: list[Counter[tuple[str, tuple[int, ...]]]] = []
    with fake_mesh(parallel_dims, rank) as mesh, CommCounter() as traffic:
        mesh.micro_batches = simulated
        trainer, tracker = Trainer.begin(config, meta, mesh), MemoryTracker(meta)

        def begin(i: int) -> None:
            sent.append(traffic.by_ranks.copy())
            go_to(trainer.model, config, 1, i * t.micro_batch_size)

        traffic.by_ranks.clear()
        with tracker:
            micro_batches = [MicroBatch(i, batch, 1.0) for i in range(simulated)]
            trainer.engine.accumulate(micro_batches, begin, lambda loss: loss, tracker.after_forward)
            trainer.engine.finish_backward()
            trainer.optimizer.clip_grad_norm_(config.optimizer.clip_norm)
            trainer.optimizer.step()
            trainer.engine.after_update()
        total = traffic.by_ranks
        for key, size in _sent_per_micro_batch(sent, total, parallel_dims).items():
            total[key] += (count - simulated) * size
        return StepEstimate(measured(trainer, tracker), total)


def _sent_per_micro_batch(
    sent: list[Counter[tuple[str, tuple[int, ...]]]],
    total: Counter[tuple[str, tuple[int, ...]]],
    parallel_dims: ParallelDims,
) -> Counter[tuple[str, tuple[int, ...]]]:
    """Bytes of one more micro-batch: those of the second one, or in a pipeline an equal share."""
    reduces_each = parallel_dims.is_sharded and parallel_dims.zero > 1 and parallel_dims.pipeline == 1
    repeated = ("activations", "gather", "reduce") if reduces_each else ("activations", "gather")
    sizes = total if parallel_dims.pipeline > 1 else total - sent[1] if len(sent) > 1 else Counter()
    count = 2 * parallel_dims.pipeline if parallel_dims.pipeline > 1 else 1
    return Counter({key: size // count for key, size in sizes.items() if key[0] in repeated})

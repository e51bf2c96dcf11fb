"""Estimates memory and traffic of a step by running it on torch's meta device.

Meta tensors have shapes and no data, and the processes of the mesh are simulated, so there is no formula that
could fall behind the code. Every operation works on unchunked tensors, as on a GPU. Whose memory it is says
the caller: inside of `devices.imagine` the step takes that GPU's path, with its kernels and native products.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.data import Batch
from narrowgauge.distributed import CommCounter, MicroBatch, ParallelDims
from narrowgauge.models import count_parameters
from narrowgauge.simulate.fake_mesh import fake_mesh
from narrowgauge.simulate.few_blocks import few_blocks, has_equal_blocks, with_layers
from narrowgauge.simulate.memory import Memory, measured
from narrowgauge.simulate.memory_tracker import MemoryTracker
from narrowgauge.training.config.config import Config
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

    A model of many blocks is estimated by models of few, and extrapolated linearly.
    """
    parts = _parts(config, parallel_dims)
    if len(parts) == 1:
        return _heaviest(config, parallel_dims)
    parameters = count_parameters(config.spec.model)
    steps = [  # extrapolated per process: with few layers another process may be the heaviest
        _sum([(_step(with_layers(config, n), parallel_dims, rank), w) for n, w in parts], parameters)
        for rank in _first_and_last_rank(parallel_dims)
    ]
    return max(steps, key=lambda step: step.memory.peak)


def _parts(config: Config, parallel_dims: ParallelDims) -> list[tuple[int, float]]:
    """Numbers of blocks, and how often a model of so many counts.

    Blocks that the recipe does not treat alike lie on some stages of a pipeline and not on others: all count.
    """
    layers, t = config.spec.model.layers, config.training
    unit = parallel_dims.stages * (t.recompute_every if t.recompute else 1)
    if layers <= 4 * unit or layers % unit:
        return [(layers, 1.0)]
    if not has_equal_blocks(config):
        return few_blocks(config) if parallel_dims.pipeline == 1 else [(layers, 1.0)]
    further = (layers - 4 * unit) / (2 * unit)
    return [(2 * unit, -further), (4 * unit, 1 + further)]


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


def _sum(parts: Sequence[tuple[StepEstimate, float]], parameters: int) -> StepEstimate:
    """The sum of steps, each as often as its weight says, of what the last one has."""

    def summed(tables: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
        weighted = [(table, weight) for table, (_, weight) in zip(tables, parts, strict=True)]
        sizes = {key: sum(weight * table.get(key, 0) for table, weight in weighted) for key in tables[-1]}
        return {key: max(0, round(size)) for key, size in sizes.items()}

    steps = [step for step, _ in parts]
    device, host = summed([s.memory.device for s in steps]), summed([s.memory.host for s in steps])
    return StepEstimate(Memory(device, host, parameters), summed([s.sent for s in steps]))


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

"""Estimates the memory and traffic of a step from simulated steps of few blocks and few micro-batches."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.distributed import ParallelDims
from narrowgauge.system.devices import imagined
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.simulate.few_blocks import few_blocks, has_equal_blocks, with_layers
from narrowgauge.trainer.simulate.memory import Memory
from narrowgauge.trainer.simulate.step import SINGLE, simulate_step
from narrowgauge.trainer.training.config.config import Config


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step of one process."""

    memory: Memory
    sent: Mapping[tuple[str, tuple[int, ...]], int]  # bytes by (purpose, ranks of the group)


_known: dict[object, StepEstimate] = {}


def estimate_memory(config: Config, parallel_dims: ParallelDims = SINGLE) -> Memory:
    """The expected memory of a step on the process that needs the most."""
    return estimate_step(config, parallel_dims).memory


def estimate_step(config: Config, parallel_dims: ParallelDims = SINGLE) -> StepEstimate:
    """The expected step of the process that needs the most: in a pipeline the first or last, else any.

    A model of many blocks is estimated by linear extrapolation from models of few. A plan asks for some steps
    twice, so those on simulated GPUs are remembered.
    """
    gpu, kernels = imagined(torch.device("meta")), os.environ.get("NARROWGAUGE_KERNELS")
    key = gpu, kernels, parallel_dims, repr(config.spec.recipe), config.model_dump_json()
    if gpu is None or key not in _known:
        parts, parameters = _parts(config, parallel_dims), count_parameters(config.spec.model)
        last = (
            parallel_dims.size - parallel_dims.size // parallel_dims.pipeline
        )  # the first of the last stage
        steps = [  # extrapolated per process: with few layers another process may be the heaviest
            _sum([(_step(with_layers(config, n), parallel_dims, rank), w) for n, w in parts], parameters)
            for rank in sorted({0, last})  # all ranks of a stage are equal
        ]
        _known[key] = max(steps, key=lambda step: step.memory.peak)
    return _known[key]


def _parts(config: Config, parallel_dims: ParallelDims) -> list[tuple[int, float]]:
    """Numbers of blocks, and the weight of each such model.

    Blocks that the recipe treats differently lie on some stages of a pipeline but not on others, so all
    count.
    """
    layers, t = config.spec.model.layers, config.training
    unit = parallel_dims.stages * (t.recompute_every if t.recompute else 1)
    if layers <= 4 * unit or layers % unit:
        return [(layers, 1.0)]
    if not has_equal_blocks(config):
        return few_blocks(config) if parallel_dims.pipeline == 1 else [(layers, 1.0)]
    further = (layers - 4 * unit) / unit
    return [(3 * unit, -further), (4 * unit, 1 + further)]  # with fewer, FSDP2's peak lies elsewhere


def _sum(parts: Sequence[tuple[StepEstimate, float]], parameters: int) -> StepEstimate:
    """The weighted sum of steps, restricted to the entries of the last one."""

    def summed(tables: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
        weighted = [(table, weight) for table, (_, weight) in zip(tables, parts, strict=True)]
        sizes = {key: sum(weight * table.get(key, 0) for table, weight in weighted) for key in tables[-1]}
        return {key: max(0, round(size)) for key, size in sizes.items()}

    steps = [step for step, _ in parts]
    device, host = summed([s.memory.device for s in steps]), summed([s.memory.host for s in steps])
    return StepEstimate(Memory(device, host, parameters), summed([s.sent for s in steps]))


def _step(config: Config, parallel_dims: ParallelDims, rank: int) -> StepEstimate:
    """A step of one rank, from no more micro-batches than the extrapolation to all of them needs."""
    count = config.training.batch_size // (parallel_dims.data * config.training.micro_batch_size)
    fewer, simulated = _simulated(parallel_dims)
    step = simulate_step(config, min(count, simulated), parallel_dims, rank)
    assert step.memory is not None
    total = step.sent[-1] - step.sent[0]
    further = max(0, count - simulated) / (simulated - fewer)
    if parallel_dims.pipeline > 1 and further:
        before = simulate_step(config, fewer, parallel_dims, rank)
        assert before.memory is not None
        first = StepEstimate(before.memory, before.sent[-1] - before.sent[0])
        last = StepEstimate(step.memory, total), 1 + further
        return _sum([(first, -further), last], step.memory.parameters)
    reduces_each = parallel_dims.is_sharded and parallel_dims.zero > 1
    repeated = ("activations", "gather", "reduce") if reduces_each else ("activations", "gather")
    for key, size in (step.sent[-1] - step.sent[2]).items() if further else ():
        total[key] += int(further) * size if key[0] in repeated else 0
    return StepEstimate(step.memory, total)


def _simulated(parallel_dims: ParallelDims) -> tuple[int, int]:
    """Two numbers of micro-batches, from which on each further one adds as much traffic and memory.

    A stage of torch's pipelines holds buffers for every micro-batch. Activations reach their peak with one
    more than the stages in 1F1B, and with three for each stage in an interleaved schedule.
    """
    stages = parallel_dims.pipeline
    several = (3 * stages, 4 * stages) if parallel_dims.chunks > 1 else (stages + 1, stages + 2)
    return several if stages > 1 else (1, 2)

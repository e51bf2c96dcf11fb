"""Estimates memory and traffic of a step by running it on torch's meta device.

Meta tensors have shapes and no data, and the processes of the mesh are simulated, so there is no formula that
could fall behind the code. Every operation works on unchunked tensors, as on a GPU.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowgauge.data import Batch
from narrowgauge.distributed import CommCounter, MicroBatch, ParallelDims, fake_mesh
from narrowgauge.errors import UserError
from narrowgauge.models import count_parameters
from narrowgauge.nn import set_step
from narrowgauge.training.config.config import Config, make_config
from narrowgauge.training.monitor import hardware
from narrowgauge.training.monitor.memory import Memory, measured
from narrowgauge.training.monitor.memory_tracker import MemoryTracker
from narrowgauge.training.step.trainer import Trainer
from narrowgauge.units import human_bytes, parse_bytes

ALONE = ParallelDims()


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step of one process.

    Attributes:
        memory: bytes by class.
        sent: bytes sent for each (purpose, ranks of the group); see `distributed.comm.byte_counter`.
    """

    memory: Memory
    sent: Mapping[tuple[str, tuple[int, ...]], int]


def estimate_memory(config: Config, parallel_dims: ParallelDims = ALONE) -> Memory:
    """The expected memory of a step on the process that needs most."""
    return estimate_step(config, parallel_dims).memory


def estimate_step(config: Config, parallel_dims: ParallelDims = ALONE) -> StepEstimate:
    """The expected step of the process that needs most: in a pipeline the first or the last, else any.

    A model of many equal blocks is estimated twice with a few blocks, and extrapolated linearly.
    """
    model, t = config.resolved_model(), config.training
    unit = parallel_dims.stages * (t.recompute_every if t.recompute else 1)
    if model.layers <= 4 * unit or model.layers % unit:
        return _heaviest(config, parallel_dims)
    further, parameters = (model.layers - 4 * unit) / (2 * unit), count_parameters(model)
    few, more = (_with_layers(config, n * unit) for n in (2, 4))
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
    size = parallel_dims.size
    return [0] if parallel_dims.pipeline == 1 else [0, size - size // parallel_dims.pipeline]


def _with_layers(config: Config, layers: int) -> Config:
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
            set_step(trainer.model, t.seed, 1, i * t.micro_batch_size, t.steps)

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


def require_memory(config: Config, device: torch.device, parallel_dims: ParallelDims = ALONE) -> Memory:
    """Estimate the memory of a run, and refuse one that cannot fit.

    Linux overcommits a CPU's memory, and kills a process that uses more than there is without a message.

    Raises:
        UserError: the state alone is larger than the device's memory, or the step than `memory_limit`.
    """
    available, parameters = hardware.total_memory(device), count_parameters(config.resolved_model())
    least = parameters * _least_bytes(config) / (parallel_dims.size // parallel_dims.replicate)
    if least > available:  # too large even for the estimate
        raise UserError(f"{_too_large(config, parameters, least, device)}; choose a smaller --model")
    memory = estimate_memory(config, parallel_dims)
    on_host = 0 if device.type != "cpu" else sum(memory.host.values())  # a CPU's device is its host
    if memory.state + on_host > available:
        advice = _advice(config, available, device.type != "cpu", parallel_dims)
        raise UserError(f"{_too_large(config, parameters, memory.state, device)}; {advice}")
    limit = parse_bytes(config.training.memory_limit)
    if limit and memory.peak > limit:
        raise UserError(
            f"a step is expected to take {human_bytes(memory.peak)}, and training.memory_limit is "
            f"{config.training.memory_limit} ({human_bytes(limit)}); "
            f"{_advice(config, limit, True, parallel_dims)}"
        )
    return memory


def _least_bytes(config: Config) -> float:
    """Lower bound of the device's bytes of state per parameter."""
    recipe = config.resolved_recipe()
    kept = (c for place, c in recipe.state.items() if c is not None and place not in recipe.offload)
    return sum(c.element.bits / 8 for c in kept)


def _too_large(config: Config, parameters: int, state: float, device: torch.device) -> str:
    return (
        f"the model has {parameters:,} parameters, whose state under recipe {config.recipe.name!r} takes "
        f"{human_bytes(int(state))}, and this {device.type} has {human_bytes(hardware.total_memory(device))}"
    )


def _advice(config: Config, limit: int, has_host: bool, parallel_dims: ParallelDims) -> str:
    options = [
        f"{option} ({human_bytes(m.peak)})"
        for option, m in cheaper(config, has_host, parallel_dims)
        if m.peak <= limit
    ]
    if options:
        return "it fits with " + ", or ".join(options)
    return "no setting of this recipe makes it fit: choose a smaller --model, or narrower state (msamp-o3)"


@dataclass
class _Change:
    options: str  # of the command line
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    parallel_dims: ParallelDims | None = None


def cheaper(
    config: Config, has_host: bool = True, parallel_dims: ParallelDims = ALONE, wider: bool = False
) -> list[tuple[str, Memory]]:
    """Changes that lower the peak: each alone, then all together.

    Args:
        config: the configuration to change.
        has_host: whether the host's memory is separate from the device's.
        layout: the mesh of the run.
        wider: also try other meshes and recipes.

    Returns:
        Pairs of command line options and the memory that is expected with them.
    """
    changes = []
    if config.training.micro_batch_size > 1:
        changes.append(_Change("--training.micro_batch_size 1", {"training": {"micro_batch_size": 1}}))
    if not config.training.recompute:
        changes.append(_Change("--training.recompute true", {"training": {"recompute": True}}))
    if not config.training.chunked_loss:
        changes.append(_Change("--training.chunked_loss true", {"training": {"chunked_loss": True}}))
    if has_host and not config.resolved_recipe().offload:
        changes.append(
            _Change("--recipe.offload master,grad,m,v", {"recipe": {"offload": "master,grad,m,v"}})
        )
    if len(changes) > 1:
        together = _Change(" ".join(c.options for c in changes))
        for change in changes:
            for section, values in change.values.items():
                together.values[section] = together.values.get(section, {}) | values
        changes.append(together)
    if wider:
        changes += _wider(config, parallel_dims)
    return [
        (c.options, estimate_memory(_changed(config, c.values), c.parallel_dims or parallel_dims))
        for c in changes
    ]


def _wider(config: Config, parallel_dims: ParallelDims) -> list[_Change]:
    """Other meshes of the same processes, twice as many processes, narrower state."""
    changes = []
    if parallel_dims.shard > 1 and parallel_dims.zero < 3:
        changes.append(_Change("--parallel.zero 3", parallel_dims=replace(parallel_dims, zero=3)))
    if parallel_dims.replicate > 1:
        options = f"--parallel.replicate 1 --parallel.shard {parallel_dims.data}"
        sharded = replace(parallel_dims, replicate=1, shard=parallel_dims.data)
        changes.append(_Change(options, parallel_dims=sharded))
    twice = replace(parallel_dims, shard=2 * parallel_dims.shard)
    if config.training.batch_size % (twice.data * config.training.micro_batch_size) == 0:
        options = f"--devices {twice.size} --parallel.shard {twice.shard}"
        changes.append(_Change(options, parallel_dims=twice))
    if config.resolved_recipe().state["m"] is not None and not config.recipe.places:
        kept = (c for c in config.resolved_recipe().state.values() if c is not None)
        if all(c.element.bits == 32 for c in kept):
            changes.append(_Change("--recipe msamp-o3", {"recipe": {"name": "msamp-o3"}}))
    return changes


def _changed(config: Config, values: dict[str, dict[str, Any]]) -> Config:
    tables = config.model_dump()
    tables["recipe"] |= tables["recipe"].pop("places")
    for section, changes in values.items():
        tables[section] |= changes
    return make_config(tables)

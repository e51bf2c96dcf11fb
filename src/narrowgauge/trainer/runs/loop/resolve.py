"""Resolves a configuration into a `Run`: makes every decision before the expensive work starts.

The device, the processes and their layout, the micro-batch, native or emulated, whether it fits in memory:
each is decided once, here, and only read afterwards.

Model and data are checked as well: first by the files alone, before anything is read, then completely.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.distributed import ParallelDims, resolve_dims
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.recipes import Backend, require_attention_shapes
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.data import (
    AUTO,
    Dataset,
    count_windows,
    load_tokenizer,
    open_data,
    vocabulary_before_reading,
)
from narrowgauge.trainer.data.cache import Progress
from narrowgauge.trainer.distributed import Coordinator, World, check_degrees, world_from
from narrowgauge.trainer.runs.loop.default_out import default_out
from narrowgauge.trainer.runs.monitor import hardware
from narrowgauge.trainer.runs.monitor.loggers import require_sinks
from narrowgauge.trainer.runs.monitor.memory_check import require_memory
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.simulate.memory import Memory
from narrowgauge.trainer.training.config.config import Config, make_config
from narrowgauge.trainer.training.config.micro_batch import largest_size, what_fits
from narrowgauge.trainer.training.config.schema import TrainingSection
from narrowgauge.trainer.training.outline import placement
from narrowgauge.trainer.training.step.graph_choice import require_gpu_for_graph


@dataclass(frozen=True)
class Layout:
    """The layout of a run over its processes."""

    config: Config  # the configuration, with the chosen micro-batch if the user set none
    parallel_dims: ParallelDims  # the dimensions of `[parallel]`
    choice: str  # a sentence about the micro-batch; "" if it is the default or was set


def lay_out(config: Config, processes: int, run: Path | None = None) -> Layout:
    """Lay a configuration out over a number of processes.

    Args:
        config: a configuration; with `training.fit_micro_batch`, a fitting micro-batch is chosen.
        processes: the number of all processes.
        run: the run directory. If a run has begun there, its micro-batch is kept if it fits.
    """
    t, default = config.training, TrainingSection.model_fields["micro_batch_size"].default
    if not t.fit_micro_batch:
        return Layout(config, parallel_dims_of(config, processes), "")
    recorded = RunDirectory(run).micro_batch_size() if run is not None else 0
    size = largest_size(t.batch_size, _resolve(config, processes), recorded or t.micro_batch_size)
    config = config.with_training(micro_batch_size=size)
    dims, choice = parallel_dims_of(config, processes), f"micro-batches of {size} (training.micro_batch_size)"
    if size == default == (recorded or default):
        return Layout(config, dims, "")
    if size == recorded:
        return Layout(config, dims, f"{choice}, as before in this run")
    before = f"; they were of {recorded}" if recorded else ""
    share = f"{t.batch_size // dims.data} of the {t.batch_size} sequences of a step"
    return Layout(config, dims, f"{choice}, which was chosen: each process has {share}{before}")


def parallel_dims_of(config: Config, processes: int) -> ParallelDims:
    """The dimensions of `[parallel]` for a number of processes."""
    parallel_dims = _resolve(config, processes)
    model, t = config.spec.model, config.training
    recipe, length = config.spec.recipe, config.data.sequence_length
    check_degrees(model, recipe, length, t.micro_batch_size, parallel_dims)
    require_attention_shapes(recipe, model.head_dim, length, model.dim, model.attention_dropout)
    _check_batch(config, parallel_dims)
    if model.experts and t.balance_loss and parallel_dims.stages > 1:
        raise UserError(
            f"training.balance_loss = {t.balance_loss} with {parallel_dims.stages} pipeline stages: the loss "
            "is computed in the last stage, and the balance of experts in all; set --training.balance_loss 0"
        )
    if parallel_dims.size > 1 and t.compile:
        raise UserError(
            "training.compile = true with several processes: compiled code cannot communicate; "
            "set --training.compile false"
        )
    return parallel_dims


def _resolve(config: Config, processes: int) -> ParallelDims:
    return resolve_dims(ParallelDims(**config.parallel.model_dump()), processes)


def _check_batch(config: Config, dims: ParallelDims) -> None:
    """Check that each process has whole micro-batches, and as many as the pipeline's schedule needs."""
    t = config.training
    where = f"over parallel.replicate x parallel.shard = {dims.data} processes"
    if dims.chunks > 1 and dims.pipeline == 1:
        raise UserError(
            f"parallel.chunks = {dims.chunks} with parallel.pipeline = 1: chunks are the stages of "
            "each process of a pipeline; set chunks to 1, or pipeline to 2 or more"
        )
    if t.batch_size % dims.data:
        raise UserError(
            f"training.batch_size = {t.batch_size} cannot be divided {where}; {what_fits(t, dims)}"
        )
    if t.batch_size % (dims.data * t.micro_batch_size):
        raise UserError(
            f"training.batch_size = {t.batch_size} in micro-batches of {t.micro_batch_size} cannot be cut "
            f"{where}; {what_fits(t, dims)}"
        )
    micro_batches = t.batch_size // (dims.data * t.micro_batch_size)
    if micro_batches < dims.pipeline:
        raise UserError(
            f"parallel.pipeline = {dims.pipeline} needs as many micro-batches a step, and there are "
            f"{micro_batches}; {what_fits(t, dims)}"
        )
    if dims.chunks > 1 and micro_batches % dims.pipeline:
        raise UserError(
            f"parallel.chunks = {dims.chunks}: {micro_batches} micro-batches a step are not a multiple "
            f"of parallel.pipeline = {dims.pipeline}; {what_fits(t, dims)}, or set --parallel.chunks 1"
        )


@dataclass(frozen=True)
class Run(Layout):
    """A run before its first step; the same on all ranks except for rank and device."""

    path: Path  # the run directory, which stores the configuration
    world: World  # the processes
    device: torch.device  # the device of this process
    backend: Backend  # whether low-precision GEMMs run natively, and why
    memory: Memory | None  # the expected memory of a step, in bytes
    placement: list[str]  # a sentence for each layer or block that the recipe treats differently


def resolve(
    config: Config | Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    allow_change: Sequence[str] = (),
) -> Run:
    """Resolve the arguments of `run` for this machine and process, and set up the device."""
    config = config if isinstance(config, Config) else make_config(config or {})
    path = Path(out) if out is not None else default_out(config, allow_change)
    device = hardware.choose_device(config.training.device)
    world = world_from(os.environ, torch.cuda.device_count() if device.type == "cuda" else 0)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.device)
    if device.type == "cuda" and config.guard.replay_every and not config.training.deterministic:
        raise UserError(
            "guard.replay_every compares every bit of a step computed twice, and a GPU's attention adds in "
            "another order each time; add --training.deterministic true, or leave it out"
        )
    hardware.use_device(device, config.training.deterministic)
    layout = lay_out(config, world.size, path)
    config, spec = layout.config, layout.config.spec
    require_gpu_for_graph(config, device)
    backend = verified_backend(spec.recipe, device, spec.backend)
    require_sinks(config.log.sinks)
    check_vocabulary(config)
    memory = require_memory(config, device, layout.parallel_dims)
    if device.type == "cuda" and (limit := parse_bytes(config.training.memory_limit)):
        share = min(1.0, limit / hardware.total_memory(device))
        torch.cuda.set_per_process_memory_fraction(share, device)  # what the allocator gives out
    tokens = config.training.micro_batch_size * config.data.sequence_length
    sentences = placement(spec.model, spec.recipe, tokens)
    grid, choice = layout.parallel_dims, layout.choice
    return Run(config, grid, choice, path, world, device, backend, memory, sentences)


def check_vocabulary(config: Config) -> None:
    """Check the model's vocabulary against that of data and tokenizer, as far as their files record it.

    It reads no text and no tokens, so it runs before processes are started and text is prepared.
    """
    data = config.data
    if (needed := vocabulary_before_reading(data.source, data.tokenizer, data.weights)) is not None:
        _require_vocabulary(config, needed)


def open_checked_data(config: Config, coordinator: Coordinator, progress: Progress) -> Dataset:
    """Open the data, prepared by rank 0, and check that the model and its first weights fit it.

    The tokenizer of the data must be that of the run in `model.weights`, if set.
    """
    d = config.data
    coordinator.progress("preparing the data", patience=1000.0)
    if coordinator.rank > 0:
        coordinator.barrier()
    dataset = open_data(d.source, d.tokenizer, d.weights, progress)
    check_data(config, dataset)
    weights, tokenizer = config.model.weights, RunDirectory(Path(config.model.weights)).tokenizer
    if weights and tokenizer.is_file() and load_tokenizer(tokenizer).to_json() != dataset.tokenizer.to_json():
        raise UserError(
            f"data.tokenizer = {d.tokenizer!r} is not the tokenizer that model.weights = {weights!r} was "
            "trained with, so its ids mean other text; leave data.tokenizer out"
        )
    if coordinator.rank == 0:
        coordinator.barrier()
    return dataset


def check_data(config: Config, dataset: Dataset) -> None:
    """Check that model and data fit, before the run directory is claimed."""
    _require_vocabulary(config, dataset.tokenizer.vocab_size)
    count_windows(dataset.train, config.data.sequence_length)
    count_windows(dataset.val, config.data.sequence_length, "held-out")


def _require_vocabulary(config: Config, needed: int) -> None:
    vocab_size = config.spec.model.vocab_size
    if needed > vocab_size:
        is_named = config.data.tokenizer != AUTO
        origin = f"tokenizer {config.data.tokenizer!r}" if is_named else f"data source {config.data.source!r}"
        raise UserError(
            f"{origin} has token ids up to {needed - 1}, beyond model.vocab_size = {vocab_size}; "
            f"set --model.vocab_size {needed}, or a smaller tokenizer"
        )

"""Resolves a configuration into a `Run`: makes every decision before the expensive work starts.

The run directory, the device, the processes and their layout, the micro-batch, native or emulated, whether it
fits in memory: each is decided once, here, and only read afterwards.

Model and data are checked as well: first by the files alone, before anything is read, then completely.

The name of the default run directory includes each key that changes the trajectory and differs from the
defaults of the model, source and recipe, so another learning rate is another run:

    narrowgauge train                          runs/debug-stdlib-fp8
    narrowgauge train --lr 1e-3 --seed 3       runs/debug-stdlib-fp8,lr=0.001,seed=3

The name depends only on these values, so the same command line finds its run again. A run may have another
name, for instance if its values were changed by `--allow-change`. So an existing directory with the same stem
is taken if its configuration is this one.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.distributed import ParallelDims, resolve_dims
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.recipes import Backend, device_facts, require_attention_shapes
from narrowgauge.system.devices import imagine
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import human_bytes, parse_bytes
from narrowgauge.trainer.data import (
    AUTO,
    Dataset,
    Progress,
    count_windows,
    load_tokenizer,
    open_data,
    split_sources,
    vocabulary_before_reading,
)
from narrowgauge.trainer.distributed import Coordinator, World, check_degrees, world_from
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.models.sizes import CUSTOM
from narrowgauge.trainer.runs.monitor import machine
from narrowgauge.trainer.runs.monitor.loggers import require_sinks
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.simulate import SINGLE, Memory, Room, cheaper, estimate_memory, fitting
from narrowgauge.trainer.simulate.advice import least_state
from narrowgauge.trainer.training.config.config import (
    Config,
    config_keys,
    largest_size,
    make_config,
    what_fits,
)
from narrowgauge.trainer.training.config.diff import config_diff, trajectory
from narrowgauge.trainer.training.config.schema import TrainingSection
from narrowgauge.trainer.training.outline import placement
from narrowgauge.trainer.training.step.build_model import require_gpu_for_graph

FOLDER = "runs"
LONGEST = 100  # characters of a name, all ASCII; file systems allow 255 bytes
_LONGEST_VALUE = 24
_IN_THE_NAME = ("model.name", "data.source", "recipe.name")


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
    device = machine.choose_device(config.training.device)
    world = world_from(os.environ, torch.cuda.device_count() if device.type == "cuda" else 0)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.device)
    if device.type == "cuda" and config.guard.replay_every and not config.training.deterministic:
        raise UserError(
            "guard.replay_every compares every bit of a step computed twice, and a GPU's attention adds in "
            "another order each time; add --training.deterministic true, or leave it out"
        )
    machine.use_device(device, config.training.deterministic)
    layout = lay_out(config, world.size, path)
    config, spec = layout.config, layout.config.spec
    require_gpu_for_graph(config, device)
    backend = verified_backend(spec.recipe, device, spec.backend)
    require_sinks(config.log.sinks)
    check_vocabulary(config)
    memory = require_memory(config, device, layout.parallel_dims)
    if device.type == "cuda" and (limit := parse_bytes(config.training.memory_limit)):
        share = min(1.0, limit / machine.total_memory(device))
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


def room_here(config: Config, device: torch.device) -> Room:
    """The memory of a device of this machine that a step may take; a limit represents a GPU of another."""
    has_host = device.type != "cpu" or bool(config.training.memory_limit)
    return Room.of(config, machine.total_memory(device), machine.device_name(device), has_host)


def require_memory(config: Config, device: torch.device, parallel_dims: ParallelDims = SINGLE) -> Memory:
    """Estimate the memory of a run, and refuse one that cannot fit.

    Linux overcommits a CPU's memory, and silently kills a process that uses more than there is.
    """
    total, has_host = machine.total_memory(device), device.type != "cpu"  # a CPU's device is its host
    parameters = count_parameters(config.spec.model)

    def too_large(state: float) -> str:
        return (
            f"the model has {parameters:,} parameters, whose state under recipe {config.recipe.name!r} takes "
            f"{human_bytes(int(state))}, and this {device.type} has {human_bytes(total)}"
        )

    share, least = parameters / (parallel_dims.size // parallel_dims.replicate), least_state(config, has_host)
    if share * min(least.values()) > total:  # so no change is tried
        raise UserError(f"{too_large(share * least[''])}; choose a smaller --model")
    with imagine(device_facts(device)):
        memory, room = estimate_memory(config, parallel_dims), room_here(config, device)
        on_host = 0 if has_host else sum(memory.host.values())
        if memory.state + on_host + room.context > total:
            whole = replace(room, limit=total, has_host=has_host)
            raise UserError(f"{too_large(memory.state)}; {_advice(config, whole, parallel_dims)}")
        if (limit := config.training.memory_limit) and not room.fits(memory, parallel_dims):
            raise UserError(
                f"a step is expected to take {human_bytes(room.needed(memory, parallel_dims))} with "
                f"fragmentation, and training.memory_limit is {limit} ({human_bytes(room.limit)}); "
                f"{_advice(config, room, parallel_dims)}"
            )
    return memory


def _advice(config: Config, room: Room, parallel_dims: ParallelDims) -> str:
    options = cheaper(config, room.has_host, parallel_dims)
    options = [(option, m) for option, m in options if room.fits(m, parallel_dims)]
    if not options:
        found = fitting(config, lambda m: room.fits(m, parallel_dims), room.has_host, parallel_dims)
        options = [found] if found else []
    if not options:
        return "no setting and no recipe of narrower state makes it fit: choose a smaller --model"
    needed = [f"{option} ({human_bytes(room.needed(m, parallel_dims))})" for option, m in options]
    return f"it fits with {', or '.join(needed)}"


def out_of_memory_message(
    config: Config, device: torch.device, plan: Memory | None, parallel_dims: ParallelDims
) -> str:
    """The expected memory of a step, and the changes that lower it, the largest gain first."""
    what = f"out of memory on {machine.device_name(device)}"
    advice = (
        f"lower training.micro_batch_size = {config.training.micro_batch_size}, set --training.recompute true"
    )
    if plan is not None:
        what += f"; a step is expected to take {human_bytes(plan.peak)} ({plan.classes()})"
        room = room_here(config, device)
        if reserved := room.reserved(plan):
            what += (
                f", and {human_bytes(reserved)} for fragmentation and the driver's context, of "
                f"{human_bytes(room.limit)}"
            )
        what += ", excluding the program itself and the data"
        if parallel_dims.size == 1:  # simulated process groups cannot coexist with real ones
            with suppress(MemoryError, RuntimeError), imagine(device_facts(device)):  # too little to estimate
                lower = [
                    one for one in cheaper(config, has_host=device.type == "cuda") if one[1].peak < plan.peak
                ]
                lower.sort(key=lambda one: one[1].peak)
                advice = ", ".join(f"{human_bytes(m.peak)} with {option}" for option, m in lower) or advice
    return f"{what}; {advice}, or choose a smaller --model, and name a new directory with --out"


def default_out(config: Config, allowed: Sequence[str] = ()) -> Path:
    """Choose the run directory of a configuration: that of the run it continues, else a new one.

    `allowed` lists the keys in which the existing run may differ (`--allow-change`).
    """
    start = _start(config)
    named = Path(FOLDER) / _name(start, _changed(config))
    beside = {Path(FOLDER) / start, *Path(FOLDER).glob(f"{start},*")}
    changes: dict[Path, set[str]] = {}
    for path in filter(Path.is_dir, dict.fromkeys([named, *sorted(beside)])):
        with suppress(UserError):  # not a readable run
            changes[path] = set(config_diff(RunDirectory(path).config(), config))
    for path, diff in changes.items():
        if not diff:
            return path
    changed = [path for path, diff in changes.items() if diff <= set(allowed)]
    if len(changed) > 1 and named not in changed:
        raise UserError(
            f"--allow-change {','.join(allowed)} fits {len(changed)} runs ({', '.join(map(str, changed))}); "
            "name the one that is meant with --out"
        )
    return named if named in changed or not changed else changed[0]


def _start(config: Config) -> str:
    """Model, source and recipe, in characters that every file system and shell accepts."""
    sources = "+".join(filter(None, map(_stem, split_sources(config.data.source)))) or "data"
    name = f"{_safe(config.model.name)}-{sources}-{_safe(Path(config.recipe.name).stem)}"
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{_digest(name)}"


def _stem(source: str) -> str:
    """The last part of a source that contains a letter: `texts` for `texts/*.md`."""
    return next(filter(None, (_safe(Path(part).stem) for part in Path(source).parts[::-1])), "")


def _name(start: str, changed: Mapping[str, Any]) -> str:
    """The start and the keys that differ; a digest of all keys if some do not fit or are abbreviated."""
    parts = [_part(key, value) for key, value in changed.items()]
    shown = ",".join([start, *(text for text, _ in parts)])
    if len(shown) <= LONGEST and all(is_whole for _, is_whole in parts):
        return shown
    end = f",{_digest(json.dumps(changed, sort_keys=True))}"
    name = start
    for text, _ in parts:
        if len(name) + 1 + len(text) + len(end) <= max(LONGEST, len(start) + len(end)):
            name += f",{text}"
    return name + end


def _changed(config: Config) -> dict[str, Any]:
    """The keys that change the trajectory and differ from the defaults of the model, source and recipe."""
    size = {"name": config.model.name} if config.model.name != CUSTOM else {}
    data, recipe = {"source": config.data.source}, {"name": config.recipe.name}
    base = make_config({"model": size, "data": data, "recipe": recipe})
    new = {f"{s}.{k}": v for s, table in trajectory(config).items() for k, v in table.items()}
    keys = [key for key in config_diff(base, config) if key not in _IN_THE_NAME]
    return {key: new.get(key) for key in keys}


def _part(key: str, value: Any) -> tuple[str, bool]:
    """`lr=0.001`, and whether it shows the whole value."""
    ending = key.partition(".")[2]
    is_shared = [other.partition(".")[2] for other in config_keys()].count(ending) > 1
    if isinstance(value, dict):
        return f"{key if is_shared else ending}={_safe(str(value.get('cast', 'table')))}", False
    values = value if isinstance(value, list) else [value]
    whole = "+".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    text = _safe(whole)[:_LONGEST_VALUE]
    return f"{key if is_shared else ending}={text}", text == whole


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""A run from outside: who takes part, which directory, and what is left behind at the end, however it comes.

The same call starts a run, continues one that stopped, and does nothing for one that is done.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from narrowgauge.checkpoint import lock_run
from narrowgauge.data import AUTO, Dataset, count_windows, open_data, split_sources
from narrowgauge.distributed import (
    Coordinator,
    Mesh,
    ParallelDims,
    StoppedByPeer,
    init_process_group,
    world_from,
)
from narrowgauge.errors import UserError
from narrowgauge.recipes import choose_backend, device_facts
from narrowgauge.signals import Preempted, Requests, StoppedEarly, stop_requests
from narrowgauge.training.config.config import Config, make_config
from narrowgauge.training.config.diff import ConfigDiff, check_keys
from narrowgauge.training.monitor import hardware
from narrowgauge.training.monitor.loggers import Loggers, require_sinks
from narrowgauge.training.monitor.memory import Memory
from narrowgauge.training.monitor.memory_estimate import cheaper, require_memory
from narrowgauge.training.monitor.profiler import Profile
from narrowgauge.training.monitor.progress import Display
from narrowgauge.training.run.checkpointing import make_checkpointer
from narrowgauge.training.run.init_weights import check_start
from narrowgauge.training.run.loop import OutOfMemory, RunContext, finish, start_or_resume, train
from narrowgauge.training.run.parallel_dims import parallel_dims_of
from narrowgauge.training.run.run_writer import NullRunWriter, RunWriter
from narrowgauge.training.run_directory import RunDirectory
from narrowgauge.units import human_bytes, parse_bytes


def default_out(config: Config) -> Path:
    """The run directory when none is named: runs/MODEL-SOURCE-RECIPE."""
    source = "+".join(Path(name).stem or "data" for name in split_sources(config.data.source))
    name = f"{config.model.name}-{source}-{Path(config.recipe.name).stem}"
    return Path("runs") / name


def run(
    config: Config | Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    console: Console | None = None,
    allow_change: Sequence[str] = (),
    profile: int = 0,
) -> Path:
    """Train, or continue, or find done, the run of a configuration: what `narrowgauge train` runs.

    Args:
        config: a configuration, or nested values for one; None = the embedded default.
        out: the run directory; None = `default_out`.
        console: where progress is shown; None = standard output.
        allow_change: `section.key`s that may have other values than the run began with.
        profile: how many steps to record in DIR/profile, once a few are done; none by default.

    Returns:
        The run directory.

    Raises:
        UserError: a mistake in the configuration, the data or the directory; nothing was trained.
        Preempted: SIGTERM, SIGINT or SIGUSR1 came; the state is saved.
        StoppedEarly: one of them came before the first step.
        Diverged: more than `guard.max_skips` steps in a row were skipped, or too many rollbacks.
        Corrupted: numbers that must be equal are not (`guard.replay_every`).
        OutOfMemory: a step needs more memory than there is.
        PoisonedError: weights or moments became non-finite; the checkpoints there are untouched.
        SaveError: the last save, or the one that a signal asked for, failed, or too many in a row.
    """
    check_keys(allow_change)
    config = config if isinstance(config, Config) else make_config(config or {})
    device = hardware.choose_device(config.training.device)
    world = world_from(os.environ, torch.cuda.device_count() if device.type == "cuda" else 0)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.device)
    parallel_dims = parallel_dims_of(config, world.size)
    choose_backend(config.resolved_recipe(), device_facts(device), config.recipe.backend)
    require_sinks(config.log.sinks)
    plan = require_memory(config, device, parallel_dims)
    hardware.limit_memory(device, parse_bytes(config.training.memory_limit))
    path = Path(out) if out is not None else default_out(config)
    console = (console or Console()) if world.rank == 0 else Console(quiet=True)
    with (
        hardware.memory_kept(device),
        stop_requests() as requests,
        Display(console, config.training.steps, config.log.every) as display,
    ):
        requests.nothing_to_save()
        with init_process_group(world, device, config.training.hang_timeout) as coordinator:
            dataset = _open_data(config, coordinator, display)
            with lock_run(path, coordinator.rank, coordinator.barrier):
                requests.save_first()  # until the directory has a status
                seen = Profile(path / "profile", coordinator.rank, device, profile) if profile else None
                _run(
                    config,
                    path,
                    device,
                    parallel_dims,
                    plan,
                    dataset,
                    coordinator,
                    display,
                    requests,
                    allow_change,
                    seen,
                )
    return path


def _run(
    config: Config,
    path: Path,
    device: torch.device,
    parallel_dims: ParallelDims,
    plan: Memory | None,
    dataset: Dataset,
    coordinator: Coordinator,
    display: Display,
    requests: Requests,
    allow_change: Sequence[str],
    profile: Profile | None,
) -> None:
    """The run in a directory that is locked."""
    changes: ConfigDiff = {}
    is_done = False
    if coordinator.rank == 0:
        there = RunDirectory(path)
        changes = there.claim(config, allow_change)
        is_done = there.status() == "done" and not changes
        if not is_done:
            there.check_corpus(dataset.digest, allow_change)
    if coordinator.broadcast(is_done):
        display.say(f"{path} is done; to train again, name another directory with --out")
        return
    sinks = Loggers.of(config.log.sinks, path, config.model_dump(mode="json"), display.say)
    directory = (RunWriter if coordinator.rank == 0 else NullRunWriter)(path, display.say, sinks=sinks)
    checkpointer = make_checkpointer(config, directory, display.say, coordinator)
    coordinator.record_failures_in(path, lambda cause: RunDirectory(path).set_status("failed", cause))
    try:
        with coordinator.first_failure():
            requests.nothing_to_save()
            if coordinator.rank == 0:
                dataset.tokenizer.save(directory.tokenizer)
            run_id = coordinator.broadcast(directory.run_id(dataset.digest) if coordinator.rank == 0 else "")
            job = RunContext(
                config, device, dataset, directory, display, plan, coordinator, checkpointer, run_id, profile
            )
            trainer = start_or_resume(job, changes, Mesh(parallel_dims, device))
            train(job, trainer, requests)
            finish(job, trainer)
    except (Preempted, StoppedEarly) as stop:
        directory.set_status("preempted", str(stop))
        raise
    except StoppedByPeer as stop:
        directory.set_status("preempted" if stop.code == 75 else "failed", str(stop))
        raise
    except BaseException as error:
        with suppress(OSError):  # where it went away, what happened to it is the news
            directory.require_there()
            directory.set_status("failed", f"{type(error).__name__}: {error}")
        if hardware.is_out_of_memory(error):
            raise OutOfMemory(_how_to_save_memory(config, device, plan, parallel_dims)) from error
        raise
    finally:
        if profile is not None:
            profile.close()
        try:  # at last: the others know the cause of an end before this one waits for a disk or a network
            checkpointer.end()
        finally:
            sinks.close()


def _open_data(config: Config, coordinator: Coordinator, display: Display) -> Dataset:
    """The tokens: made by the first process, then found made by the others."""
    d = config.data
    coordinator.progress("preparing the data", patience=1000.0)
    if coordinator.rank > 0:
        coordinator.barrier()
    dataset = open_data(d.source, d.tokenizer, d.weights, display.stage)
    check_data(config, dataset)
    check_start(config, dataset.tokenizer)
    if coordinator.rank == 0:
        coordinator.barrier()
    return dataset


def _how_to_save_memory(
    config: Config, device: torch.device, plan: Memory | None, parallel_dims: ParallelDims
) -> str:
    """What a step was expected to take, and what lowers that, the largest gain first."""
    what = f"out of memory on {hardware.device_name(device)}"
    advice = (
        f"lower training.micro_batch_size = {config.training.micro_batch_size}, set --training.recompute true"
    )
    if plan is not None:
        what += (
            f"; a step is expected to take {human_bytes(plan.peak)} ({plan.classes()}), beside the program "
            "itself and the data"
        )
        if others := _cheaper(config, device, plan, parallel_dims):
            advice = ", ".join(f"{human_bytes(memory.peak)} with {words}" for words, memory in others)
    return f"{what}; {advice}, or choose a smaller --model, and name a new directory with --out"


def _cheaper(
    config: Config, device: torch.device, plan: Memory, parallel_dims: ParallelDims
) -> list[tuple[str, Memory]]:
    """What is expected to take less; nothing where there is no room left even to find that out."""
    if parallel_dims.size > 1:  # the account of several processes has no place beside real ones
        return []
    with suppress(MemoryError, RuntimeError):
        found = cheaper(config, has_host=device.type == "cuda")
        return sorted((one for one in found if one[1].peak < plan.peak), key=lambda one: one[1].peak)
    return []


def check_data(config: Config, dataset: Dataset) -> None:
    """Refuse tokens that the model cannot take, before the directory is claimed for this configuration."""
    vocab_size, needed = config.resolved_model().vocab_size, dataset.tokenizer.vocab_size
    if needed > vocab_size:
        named = config.data.tokenizer != AUTO
        whose = f"tokenizer {config.data.tokenizer!r}" if named else f"data source {config.data.source!r}"
        raise UserError(
            f"{whose} has token ids up to {needed - 1}, beyond model.vocab_size = {vocab_size}; "
            f"set --model.vocab_size {needed}, or a smaller tokenizer"
        )
    count_windows(dataset.train, config.data.sequence_length)
    count_windows(dataset.val, config.data.sequence_length, "held-out")

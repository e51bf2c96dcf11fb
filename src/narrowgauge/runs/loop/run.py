"""`run()`: joins the ranks, claims the run directory, trains, and records how the run ended.

The same call starts a run, resumes a stopped one, and does nothing for a finished one.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from narrowgauge.checkpoint import lock_run
from narrowgauge.data import Dataset, open_data
from narrowgauge.distributed import (
    Coordinator,
    Mesh,
    StoppedByPeer,
    World,
    init_process_group,
    world_from,
)
from narrowgauge.errors import UserError
from narrowgauge.kernels import choose_products
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.operating_system import require_posix
from narrowgauge.runs.loop.check_data import check_data, check_vocabulary
from narrowgauge.runs.loop.checkpointing import make_checkpointer
from narrowgauge.runs.loop.default_out import default_out
from narrowgauge.runs.loop.init_weights import check_start, copy_special_tokens
from narrowgauge.runs.loop.loop import OutOfMemory, finish, start_or_resume, train
from narrowgauge.runs.loop.parallel_dims import Layout, lay_out
from narrowgauge.runs.loop.run_context import RunContext
from narrowgauge.runs.loop.run_writer import NullRunWriter, RunWriter
from narrowgauge.runs.monitor import hardware
from narrowgauge.runs.monitor.loggers import Loggers, require_sinks
from narrowgauge.runs.monitor.memory_check import out_of_memory_message, require_memory
from narrowgauge.runs.monitor.placement import placement
from narrowgauge.runs.monitor.products import products_of
from narrowgauge.runs.monitor.profiler import Profile
from narrowgauge.runs.monitor.progress import Display
from narrowgauge.runs.monitor.threads import threads_of
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.signals import Preempted, Requests, StoppedEarly, stop_requests
from narrowgauge.simulate.memory import Memory
from narrowgauge.training.config.config import Config, make_config
from narrowgauge.training.config.diff import ConfigDiff, check_keys
from narrowgauge.units import parse_bytes


def run(
    config: Config | Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    console: Console | None = None,
    allow_change: Sequence[str] = (),
    profile: int = 0,
) -> Path:
    """Train the run of a configuration, as `narrowgauge train` does.

    Args:
        config: a configuration, or nested values for one; None: the embedded default.
        out: the run directory; None: `default_out`.
        console: the console for progress; None: standard output.
        allow_change: `section.key`s whose values may differ from those of the existing run.
        profile: the number of steps to profile into DIR/profile, after a few others; 0: none.

    Returns:
        The run directory.

    Raises:
        UserError: configuration, data or directory are invalid; nothing was trained.
        Preempted: SIGTERM, SIGINT or SIGUSR1 arrived; the state is saved.
        StoppedEarly: one of them arrived before the first step.
        Diverged: more than `guard.max_skips` steps in a row were skipped, or too many rollbacks.
        Corrupted: numbers that must be equal differ (`guard.check_every`, `guard.replay_every`).
        OutOfMemory: a step needs more memory than there is.
        PoisonedError: weights or moments became non-finite; existing checkpoints are unchanged.
        SaveError: the last save or one requested by a signal failed, or too many in a row.
    """
    require_posix("a run")
    check_keys(allow_change)
    config = config if isinstance(config, Config) else make_config(config or {})
    setup = _set_up(config, Path(out) if out is not None else default_out(config, allow_change))
    config = setup.config
    console = (console or Console()) if setup.world.rank == 0 else Console(quiet=True)
    with (
        hardware.memory_kept(setup.device),
        stop_requests() as requests,
        Display(console, config.training.steps, config.log.every) as display,
    ):
        requests.nothing_to_save()
        with init_process_group(setup.world, setup.device, config.training.hang_timeout) as coordinator:
            dataset = _open_data(config, coordinator, display)
            with lock_run(setup.path, coordinator.rank, coordinator.barrier):
                requests.save_first()  # until the directory has a status
                changes = _claim(setup, dataset, coordinator, allow_change)
                if changes is None:
                    display.log(f"{setup.path} is done; to train again, name another directory with --out")
                else:
                    for sentence in (setup.layout.choice, *placement(config)):
                        if sentence:
                            display.log(sentence)
                    _run(setup, dataset, coordinator, display, requests, changes, profile)
    return setup.path


@dataclass(frozen=True)
class _Setup:
    """The decisions that precede everything which costs time; equal on all ranks but for rank and device."""

    layout: Layout
    path: Path
    world: World
    device: torch.device
    plan: Memory | None

    @property
    def config(self) -> Config:
        """The configuration, with the micro-batch that the run takes."""
        return self.layout.config


def _set_up(config: Config, path: Path) -> _Setup:
    """Choose the device and the backend, and refuse what this machine cannot run."""
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
    config = layout.config
    verified_backend(config.spec.recipe, device, config.recipe.backend)
    require_sinks(config.log.sinks)
    check_vocabulary(config)
    plan = require_memory(config, device, layout.parallel_dims)
    hardware.limit_memory(device, parse_bytes(config.training.memory_limit))
    return _Setup(layout, path, world, device, plan)


def _claim(
    setup: _Setup, dataset: Dataset, coordinator: Coordinator, allow_change: Sequence[str]
) -> ConfigDiff | None:
    """Make the run directory this run's: the changes of its configuration, or None if it is done."""
    changes: ConfigDiff = {}
    is_done = False
    if coordinator.rank == 0:
        existing = RunDirectory(setup.path)
        changes = existing.claim(setup.config, allow_change)
        is_done = existing.status() == "done" and not changes
        if not is_done:
            existing.check_corpus(dataset.digest, allow_change)
    return None if coordinator.broadcast(is_done) else changes


def _run(
    setup: _Setup,
    dataset: Dataset,
    coordinator: Coordinator,
    display: Display,
    requests: Requests,
    changes: ConfigDiff,
    profiled_steps: int,
) -> None:
    """Train in the locked run directory, and record how the run ended."""
    config, path, device, plan = setup.config, setup.path, setup.device, setup.plan
    profile = Profile(path / "profile", coordinator.rank, device, profiled_steps) if profiled_steps else None
    sinks = Loggers.of(config.log.sinks, path, config.model_dump(mode="json"), display.log)
    directory = (RunWriter if coordinator.rank == 0 else NullRunWriter)(path, display.log, sinks=sinks)
    checkpointer = make_checkpointer(config, directory, display.log, coordinator)
    coordinator.record_failures_in(path, lambda cause: RunDirectory(path).set_status("failed", cause))
    try:
        with coordinator.first_failure():
            requests.nothing_to_save()
            if coordinator.rank == 0:
                dataset.tokenizer.save(directory.tokenizer)
                copy_special_tokens(config, directory)
            run_id = coordinator.broadcast(directory.run_id(dataset.digest) if coordinator.rank == 0 else "")
            products = _choose_arithmetic(config.training.threads, directory, device, coordinator, display)
            context = RunContext(
                config,
                device,
                dataset,
                directory,
                display,
                plan,
                coordinator,
                checkpointer,
                run_id,
                profile,
                products,
            )
            trainer = start_or_resume(context, changes, Mesh(setup.layout.parallel_dims, device))
            train(context, trainer, requests)
            finish(context, trainer)
    except (Preempted, StoppedEarly) as stop:
        directory.set_status("preempted", str(stop))
        raise
    except StoppedByPeer as stop:
        directory.set_status("preempted" if stop.code == 75 else "failed", str(stop))
        raise
    except BaseException as error:
        with suppress(OSError):  # if the directory disappeared, the original error matters more
            directory.require_there()
            directory.set_status("failed", f"{type(error).__name__}: {error}")
        if hardware.is_out_of_memory(error):
            raise OutOfMemory(
                out_of_memory_message(config, device, plan, setup.layout.parallel_dims)
            ) from error
        raise
    finally:
        if profile is not None:
            profile.close()
        try:  # last: peers learn the cause of an end before this rank waits for a disk or a network
            checkpointer.end()
        finally:
            sinks.close()


def _choose_arithmetic(
    pinned: int, directory: RunDirectory, device: torch.device, coordinator: Coordinator, display: Display
) -> str:
    """Set a CPU's threads and the precision of its products, equal on all ranks; returns the precision.

    `pinned` is the number of threads in the configuration, or 0. A GPU takes neither: its recipe says the
    precision, which is "" then.
    """
    choice: tuple[str, int, str] = ("", pinned or torch.get_num_threads(), "")
    if device.type == "cpu":
        if coordinator.rank == 0:
            lines = directory.lines()
            threads, words = threads_of(lines, pinned)
            torch.set_num_threads(threads)  # the products are timed with them
            choice = (products_of(lines), threads, words)
        choice = coordinator.broadcast(choice)
    name, threads, words = choice
    torch.set_num_threads(threads)
    choose_products(name)
    if words:
        display.log(words)
    return name


def _open_data(config: Config, coordinator: Coordinator, display: Display) -> Dataset:
    """Open the data: rank 0 prepares it, then the other ranks open the result."""
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

"""`run()` joins the ranks, claims the run directory, trains, and records how the run ended.

The same call starts a run, resumes a stopped one, and does nothing for a finished one.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.distributed import Mesh
from narrowgauge.kernels.dispatch import kernels_missing
from narrowgauge.system.errors import EXIT_PREEMPTED
from narrowgauge.system.operating_system import require_posix
from narrowgauge.system.signals import Preempted, Requests, StoppedEarly, stop_requests
from narrowgauge.trainer.checkpoint import lock_run
from narrowgauge.trainer.data import Dataset
from narrowgauge.trainer.distributed import Coordinator, StoppedByPeer, init_process_group
from narrowgauge.trainer.runs.loop.loop import OutOfMemory, finish, start_or_resume, train
from narrowgauge.trainer.runs.loop.resolve import Run, open_checked_data, resolve
from narrowgauge.trainer.runs.loop.run_context import Checkpointer, RunContext
from narrowgauge.trainer.runs.monitor import hardware
from narrowgauge.trainer.runs.monitor.arithmetic import AttentionShape, choose_arithmetic
from narrowgauge.trainer.runs.monitor.loggers import SINKS, Loggers
from narrowgauge.trainer.runs.monitor.memory_check import out_of_memory_message
from narrowgauge.trainer.runs.monitor.profiler import Profile
from narrowgauge.trainer.runs.monitor.progress import Display
from narrowgauge.trainer.runs.run_directory import NullRunWriter, RunDirectory, RunWriter, claim_together
from narrowgauge.trainer.training.config.config import Config
from narrowgauge.trainer.training.config.diff import ConfigDiff, check_keys


def run(
    config: Config | Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    console: Console | None = None,
    allow_change: Sequence[str] = (),
    profile: int = 0,
) -> Path:
    """Train the run of a configuration, as `narrowgauge train` does.

    Args:
        config: a configuration, or nested values for one; None for the embedded default.
        out: the run directory; None for `default_out`.
        console: the console for progress; None for standard output.
        allow_change: `section.key`s whose values may differ from the existing run.
        profile: the number of steps to profile into DIR/profile, after a few others; 0 for none.

    Returns:
        The run directory.

    Raises:
        UserError: configuration, data or directory are invalid; nothing was trained.
        Preempted: SIGTERM, SIGINT, SIGHUP or SIGUSR1 arrived; the state is saved.
        StoppedEarly: one of them arrived before the first step.
        Diverged: more than `guard.max_skips` steps in a row were skipped, or too many rollbacks.
        Corrupted: values that must be equal differ (`guard.check_every`, `guard.replay_every`).
        OutOfMemory: a step needs more memory than there is.
        PoisonedError: weights or moments became non-finite; existing checkpoints are unchanged.
        SaveError: the last save or one requested by a signal failed, or too many in a row.
    """
    require_posix("a run")
    check_keys(allow_change)
    resolved = resolve(config, out, allow_change)
    path = resolved.path
    console = (console or Console()) if resolved.world.rank == 0 else Console(quiet=True)
    with (
        hardware.memory_kept(resolved.device),
        stop_requests() as requests,
        Display(console, resolved.config.training.steps, resolved.config.log.every) as display,
    ):
        patience = resolved.config.training.hang_timeout
        with init_process_group(resolved.world, resolved.device, patience) as coordinator:
            dataset = open_checked_data(resolved.config, coordinator, display.stage)
            with lock_run(path, coordinator.rank, coordinator.barrier):
                requests.save_first()  # until the directory has a status
                changes = claim_together(path, resolved.config, dataset.digest, coordinator, allow_change)
                if changes is None:
                    display.log(f"{path} is done; to train again, name another directory with --out")
                else:
                    missing = kernels_missing(resolved.device)
                    for sentence in (resolved.config.warning, resolved.choice, missing, *resolved.placement):
                        if sentence:
                            display.log(sentence)
                    _train(resolved, dataset, coordinator, display, requests, changes, profile)
    return path


def _train(
    resolved: Run,
    dataset: Dataset,
    coordinator: Coordinator,
    display: Display,
    requests: Requests,
    changes: ConfigDiff,
    profiled_steps: int,
) -> None:
    """Train in the locked run directory, and record how the run ended."""
    config, path, device = resolved.config, resolved.path, resolved.device
    profile = Profile(path / "profile", coordinator.rank, device, profiled_steps) if profiled_steps else None
    values = config.model_dump(mode="json")
    sinks = Loggers({name: partial(SINKS[name], path, values) for name in config.log.sinks}, display.log)
    directory = (RunWriter if coordinator.rank == 0 else NullRunWriter)(path, display.log, sinks=sinks)
    checkpointer = Checkpointer(directory, display.log, coordinator, config.checkpoint.asynchronous)
    coordinator.record_failures_in(path, lambda cause: RunDirectory(path).set_status("failed", cause))
    try:
        with coordinator.first_failure():
            requests.nothing_to_save()
            run_id = ""
            if coordinator.rank == 0:
                run_id = directory.run_id(dataset.digest)
                dataset.tokenizer.save(directory.tokenizer)
                if weights := config.model.weights:  # for a later export
                    directory.keep_special_tokens(RunDirectory(Path(weights)).special_tokens())
            threads, shape = config.training.threads, AttentionShape.of(config)
            arithmetic = choose_arithmetic(threads, shape, directory.lines, device, coordinator, display.log)
            run_id, live = coordinator.broadcast(run_id), (directory, display, coordinator, checkpointer)
            context = RunContext(resolved, dataset, *live, run_id, profile, arithmetic)
            trainer = start_or_resume(context, changes, Mesh(resolved.parallel_dims, device))
            train(context, trainer, requests)
            finish(context, trainer)
    except (Preempted, StoppedEarly) as stop:
        directory.set_status("preempted", str(stop))
        raise
    except StoppedByPeer as stop:
        directory.set_status("preempted" if stop.code == EXIT_PREEMPTED else "failed", str(stop))
        raise
    except BaseException as error:
        with suppress(OSError):  # if the directory disappeared, the original error matters more
            directory.require_there()
            directory.set_status("failed", f"{type(error).__name__}: {error}")
        if hardware.is_out_of_memory(error):
            raise OutOfMemory(
                out_of_memory_message(config, device, resolved.memory, resolved.parallel_dims)
            ) from error
        raise
    finally:
        if profile is not None:
            profile.close()
        try:  # last: peers learn why this rank ended before it waits for a disk or a network
            checkpointer.end()
        finally:
            sinks.close()

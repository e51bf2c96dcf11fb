"""The training loop: the run directory, the initial state, the steps, the end.

`run()` starts a run, resumes a stopped one, and does nothing for a finished one.

The order after every step is: gauges (if due), metrics line, checkpoint (if due). So a checkpoint of step n
never exists without the lines up to n; on a resume later lines are dropped and written again with the same
digits. All ranks run the same loop: only rank 0 records, displays and samples, and every decision is shared
(`Coordinator`).
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from narrowgauge.distributed import Mesh
from narrowgauge.kernels.dispatch import kernels_missing
from narrowgauge.nn import Gauges, audit
from narrowgauge.quantization import shard_of, write_weight
from narrowgauge.system.errors import EXIT_PREEMPTED, Failed, UserError
from narrowgauge.system.operating_system import require_posix
from narrowgauge.system.signals import Preempted, Requests, StoppedEarly, is_compared, stop_requests
from narrowgauge.system.units import human_bytes, parse_bytes
from narrowgauge.trainer.checkpoint import choose_step, load, lock_run, require_space_for_run
from narrowgauge.trainer.data import Dataset, Loader
from narrowgauge.trainer.distributed import START, Coordinator, StoppedByPeer, init_process_group
from narrowgauge.trainer.models import Transformer, generate
from narrowgauge.trainer.runs.loop.recovery import record_raises, recover
from narrowgauge.trainer.runs.loop.resolve import Run, open_checked_data, out_of_memory_message, resolve
from narrowgauge.trainer.runs.loop.run_context import RunContext, now
from narrowgauge.trainer.runs.loop.validation import validation_loss
from narrowgauge.trainer.runs.monitor import machine
from narrowgauge.trainer.runs.monitor.loggers import SINKS, Loggers
from narrowgauge.trainer.runs.monitor.machine import choose_arithmetic
from narrowgauge.trainer.runs.monitor.profiler import Profile
from narrowgauge.trainer.runs.monitor.progress import Display
from narrowgauge.trainer.runs.run_directory import NullRunWriter, RunDirectory, RunWriter
from narrowgauge.trainer.runs.use.trained_model import held_out_batches, open_run
from narrowgauge.trainer.simulate import Memory, MemoryTracker
from narrowgauge.trainer.training.config.config import Config
from narrowgauge.trainer.training.config.diff import ConfigDiff, check_keys
from narrowgauge.trainer.training.step.build_model import model_of
from narrowgauge.trainer.training.step.trainer import Trainer, token_lines

StepResult = tuple[float, float, float]  # loss, gradient norm, learning rate
_SAMPLED = 160  # tokens, a paragraph; at most one a step, so a sample never takes longer than the training


class OutOfMemory(Failed):
    """The device's memory is too small for a step: exit code 1."""


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
        machine.memory_kept(resolved.device),
        stop_requests() as requests,
        Display(console, resolved.config.training.steps, resolved.config.log.every) as display,
    ):
        patience = resolved.config.training.hang_timeout
        with init_process_group(resolved.world, resolved.device, patience) as coordinator:
            dataset = open_checked_data(resolved.config, coordinator, display.stage)
            with lock_run(path, coordinator.rank, coordinator.barrier):
                requests.save_first()  # until the directory has a status
                changes: ConfigDiff = {}  # all in keys of `allow_change`
                is_done = False
                if coordinator.rank == 0:  # it claims the directory for all
                    existing = RunDirectory(path)
                    changes = existing.claim(resolved.config, allow_change)
                    is_done = existing.status() == "done" and not changes
                    if not is_done:
                        existing.check_corpus(dataset.digest, allow_change)
                if coordinator.broadcast(is_done):
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
    profile = Profile(path / "profile", coordinator.rank, device, profiled_steps)
    values = config.model_dump(mode="json")
    sinks = Loggers({name: partial(SINKS[name], path, values) for name in config.log.sinks}, display.log)
    directory = (RunWriter if coordinator.rank == 0 else NullRunWriter)(path, display.log, sinks=sinks)
    context = RunContext(resolved, dataset, directory, display, coordinator, profile)
    coordinator.record_failures_in(path, lambda cause: RunDirectory(path).set_status("failed", cause))
    try:
        with coordinator.first_failure():
            requests.nothing_to_save()
            if coordinator.rank == 0:
                context.run_id = directory.run_id(dataset.digest)
                dataset.tokenizer.save(directory.tokenizer)
                if weights := config.model.weights:  # for a later export
                    directory.keep_special_tokens(RunDirectory(Path(weights)).special_tokens())
            context.arithmetic = choose_arithmetic(config, directory.lines, device, coordinator, display.log)
            context.run_id = coordinator.broadcast(context.run_id)
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
        if machine.is_out_of_memory(error):
            raise OutOfMemory(
                out_of_memory_message(config, device, resolved.memory, resolved.parallel_dims)
            ) from error
        raise
    finally:
        profile.close()
        try:  # last: peers learn why this rank ended before it waits for a disk or a network
            context.end()
        finally:
            sinks.close()


def start_or_resume(context: RunContext, changes: Mapping[str, tuple[object, object]], mesh: Mesh) -> Trainer:
    """Restore the newest valid checkpoint, or initialize a new state; `changes` are adopted."""
    directory, log, coordinator = context.directory, context.display.log, context.coordinator
    coordinator.progress("choosing a checkpoint", START)
    checkpoint, refused = choose_step(directory.checkpoints, context.run_id, coordinator.control)
    for sentence in refused:
        log(f"passed over: {sentence}")
    coordinator.progress("building the model", START)
    trainer = Trainer.begin(context.run.config, context.run.device, mesh)
    if checkpoint is None:
        _start_from_weights(context.run.config, trainer.model)
        log(f"run directory: {directory.path}")
        directory.keep_metrics_until(-1)
    else:
        trainer.restore(checkpoint, coordinator.control)
        log(f"continuing {directory.path} after step {trainer.step}")
        directory.keep_metrics_until(trainer.step, trainer.guard.rollbacks)
    plan = trainer.plan_save(directory.checkpoints, context.run_id, coordinator.control)
    require_space_for_run(directory.checkpoints, plan.space, plan.keep)
    directory.adopt(context.run.config, changes, context.dataset.digest, trainer.step, context.run_id)
    event = "start" if checkpoint is None else "resume"
    directory.record({"event": event, "step": trainer.step, **context.facts})
    record_raises(context, trainer)
    directory.set_status("running", "")
    return trainer


def train(context: RunContext, trainer: Trainer, requests: Requests) -> None:
    """Take all remaining steps, or raise `Preempted` if a signal arrived and the state is saved."""
    directory, steps = context.directory, context.run.config.training.steps
    if trainer.step == 0:
        found = _validate(context, trainer)
        directory.record({"step": 0, "tokens": 0, **found})
        context.display.log(f"step {0:>6}/{steps}  val loss {found['val_loss']:.4f}")
    is_warm = False
    while trainer.step < steps:
        with trainer.batches(context.dataset.train) as batches:
            _steps(context, trainer, batches, requests, is_warm)
        is_warm = True


def _steps(context: RunContext, trainer: Trainer, batches: Loader, requests: Requests, is_warm: bool) -> None:
    """Take steps to the end, or until a rollback changes the batches."""
    directory, config = context.directory, context.run.config
    steps = config.training.steps
    last_save = time.monotonic()
    tokens = _tokens_seen(context, trainer)
    requests.save_first()
    while trainer.step < steps:
        context.coordinator.progress(f"step {trainer.step + 1}", 1.0 if is_warm else START)
        take_step = _measured_step if is_warm else _first_step
        line = take_step(context, trainer, batches, tokens)
        is_warm, tokens = True, line["tokens"]
        is_last = trainer.step == steps
        # Read once: a signal may arrive at any moment, and the stop below must follow the save it requests.
        is_late = time.monotonic() - last_save > 60 * config.checkpoint.every_minutes
        shared = context.coordinator.all_reduce_max(asked=requests.number, late=is_late)
        asked = "" if is_last or not shared["asked"] else signal.Signals(shared["asked"]).name
        if is_last or trainer.step % config.validation.every == 0:
            line |= _validate(context, trainer)
        directory.record(line)
        context.display.step(line)
        if trainer.verdict.action in ("rollback", "raise"):
            context.settle()  # the rollback target may still be pending
        if recover(context, trainer, line["loss"], line["grad_norm"]):
            return
        if (check := config.guard.check_every) and trainer.step % check == 0:
            trainer.check_replicas()
        if is_last or shared["late"] or asked or trainer.step % config.checkpoint.every == 0:
            context.save(trainer, must=is_last or bool(asked))
            last_save = time.monotonic()
        if asked:
            directory.record({"event": "stop", "step": trainer.step, "reason": asked, "time": now()})
            raise Preempted(f"{asked} after step {trainer.step}; rerun the same command to resume")


def _tokens_seen(context: RunContext, trainer: Trainer) -> int:
    """The tokens of the steps done, from their lines: sizes may have changed (`--allow-change`)."""
    lines = context.directory.lines() if context.coordinator.rank == 0 else []  # it records for all
    counted = [line for line in lines if "tokens" in line]
    step, tokens = (counted[-1]["step"], counted[-1]["tokens"]) if counted else (0, 0)
    return int(tokens) + (trainer.step - step) * context.run.config.tokens_per_step


def _first_step(context: RunContext, trainer: Trainer, batches: Loader, seen: int) -> dict[str, Any]:
    """Take the first step of this process, and record its memory and what its layers computed in."""
    run = context.run
    is_hidden = run.config.training.compile and run.device.type != "cuda"  # compiled operations
    if run.memory is None or is_hidden:
        line = _measured_step(context, trainer, batches, seen)
    else:
        with MemoryTracker(run.device) as tracker:
            line = _measured_step(context, trainer, batches, seen, tracker.after_forward)
        _report_memory(context, trainer.step, tracker.measured(trainer), run.memory)
    if run.config.spec.recipe.is_narrow and context.coordinator.rank == 0:
        layers = [asdict(record) for record in audit(trainer.model)]
        context.directory.record({"event": "audit", "step": trainer.step, "layers": layers})
    return line


def _report_memory(context: RunContext, step: int, memory: Memory, plan: Memory) -> None:
    """Record and log the memory of a step and the estimate, and hold it to `training.memory_limit`."""
    facts = {"parameters": memory.parameters, **memory.as_json(), "expected": plan.as_json()}
    context.directory.record({"event": "memory", "step": step, **facts})
    on_host = f"; on the host {human_bytes(sum(memory.host.values()))}" if memory.host else ""
    context.display.log(
        f"memory: {memory.classes()} = {human_bytes(memory.peak)}, expected {human_bytes(plan.peak)}{on_host}"
    )
    limit = parse_bytes(context.run.config.training.memory_limit)
    if limit and memory.peak > limit:
        raise OutOfMemory(
            f"a step took {human_bytes(memory.peak)}, and training.memory_limit is {human_bytes(limit)}; "
            "raise it, or see `narrowgauge plan` for what lowers the peak"
        )


def _measured_step(
    context: RunContext,
    trainer: Trainer,
    batches: Loader,
    seen: int,
    after_forward: Callable[[torch.Tensor], None] | None = None,
) -> dict[str, Any]:
    """Take an optimizer step after `seen` tokens, and return its metrics line."""
    config = context.run.config
    machine.synchronize(context.run.device)
    start = time.perf_counter()
    every, number, gauges = config.gauges.every, trainer.step + 1, None
    is_due = every and (number % every == 0 or number == config.training.steps)  # a short run is read as well
    if is_due and context.coordinator.rank == 0:  # it reads for all
        gauges = Gauges.of(trainer.model, trainer.optimizer, trainer.names)
    loss, norm, lr = _profiled(context, trainer, lambda: trainer.train_step(batches, after_forward, gauges))
    if gauges is not None:
        lines = token_lines(trainer.tokens, trainer.step)
        context.directory.record_gauges([*gauges.lines(trainer.step), *lines])
    seconds = time.perf_counter() - start  # reading the loss on the host completed the step
    tokens = config.tokens_per_step
    flops, peak = context.facts["flops_per_token"] * tokens, context.facts["peak_flops"]
    return {
        "step": trainer.step,
        "loss": loss,
        **trainer.terms,
        "lr": lr,
        "grad_norm": norm,
        "tokens": seen + tokens,
        "tokens_per_s": tokens / seconds,
        "step_ms": 1000 * seconds,
        "mfu": flops / seconds / peak / context.coordinator.size if peak else None,
        "memory_bytes": machine.memory_at_peak(context.run.device)["allocated"],
    }


def _profiled(context: RunContext, trainer: Trainer, take: Callable[[], StepResult]) -> StepResult:
    """Take a step; if it completes the requested profile, record and log the step time."""
    number, steps = trainer.step + 1, context.run.config.training.steps
    result, step_time = context.profile.step(number, take, is_last=number == steps)
    if step_time is not None:
        facts = {"step_ms": step_time.step_ms, "ms": step_time.classes, "device": step_time.device}
        context.directory.record({"event": "step time", "step": trainer.step, **facts})
        context.display.log(f"profile: {step_time}; {context.profile.trace} opens in ui.perfetto.dev")
    return result


def _validate(context: RunContext, trainer: Trainer) -> dict[str, Any]:
    context.coordinator.progress(f"the validation after step {trainer.step}", START)
    config = context.run.config
    batches = held_out_batches(config, context.dataset.val, batches=config.validation.batches)
    return validation_loss(trainer.engine, trainer.go_to_sample, batches).record()


def finish(context: RunContext, trainer: Trainer) -> None:
    """Generate a text sample, and write it and the final status, on rank 0 alone."""
    if context.coordinator.rank > 0:
        return
    config, dataset, tokenizer = context.run.config, context.dataset, context.dataset.tokenizer
    prompt = config.log.prompt or ("def __init__(self" if config.data.source == "stdlib" else "")
    prompt = prompt or tokenizer.decode(dataset.val.streams[0][1:9].tolist())  # the first held-out tokens
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    model = trainer.model
    if context.coordinator.size > 1:  # the full model of the last step, on this process
        checkpoint = load(context.directory.checkpoints / f"step-{trainer.step}")
        model = model_of(trainer.config, checkpoint, trainer.device)[1]
    count = min(_SAMPLED, config.training.steps)
    new = generate(model, ids, count, temperature=0.7, top_k=40, seed=config.spec.seed)
    sample = tokenizer.decode_after(ids, new)
    done = {"event": "done", "step": trainer.step, "prompt": prompt, "sample": sample, "time": now()}
    context.directory.record(done)
    context.directory.set_status("done", f"all {trainer.step} steps")
    if not is_compared():
        context.display.log(f"\nsample, from {prompt!r}:\n{prompt}{sample}\n")


def _start_from_weights(config: Config, model: Transformer) -> None:
    """Copy the weights of the run in `model.weights`, if set, into a new model, or its shards into a part.

    For fine-tuning, or for training on other text: `narrowgauge import Qwen2.5-0.5B/ --out base`, then
    `narrowgauge train --model.weights base --data my-texts/ --recipe fp8`. The weights are copied as float32,
    so the two runs may have different recipes.
    """
    if not (run := config.model.weights):
        return
    weights = open_run(Path(run), "cpu").weights()
    with torch.device("meta"):
        full_model = Transformer(config.spec.model)
    shapes = {name: p.shape for name, p in full_model.named_parameters(remove_duplicate=False)}
    for name in sorted(shapes.keys() | weights.keys()):
        shape = tuple(weights[name].shape) if name in weights else "nothing"
        needed = tuple(shapes[name]) if name in shapes else "nothing"
        if shape != needed:
            raise UserError(
                f"model.weights = {run!r} is another model: {name} is {shape} there and "
                f"{needed} here; leave the dimensions out to take them from it"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shard = shard_of(parameter)
        write_weight(parameter, weights[name] if shard is None else shard.local_of(weights[name]))

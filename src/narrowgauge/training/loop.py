"""The run, top to bottom: claim the directory, tokens, state, steps, and what is left behind at the end.

The same call starts a run, continues one that stopped, and does nothing for one that is done. After every
step the order is: gauges (where due), metrics line, then (where due) checkpoint. A checkpoint of step n
therefore never exists without the lines up to n, and on return the lines after it are dropped and made again,
to the same digits.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from narrowgauge.checkpoint import choose_step, load, lock_run
from narrowgauge.data import AUTO, Dataset, Loader, count_windows, open_data, split_sources
from narrowgauge.distributed import START, Crew, Layout, Mesh, Stopped, joined, world_from
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, count_parameters, flops_per_token, generate
from narrowgauge.nn import DTYPES
from narrowgauge.recipes import choose_backend, device_facts
from narrowgauge.signals import Preempted, Requests, StoppedEarly, stop_requests
from narrowgauge.training import machine
from narrowgauge.training.changes import Changes, check_keys
from narrowgauge.training.config import Config, make_config
from narrowgauge.training.directory import RunDirectory
from narrowgauge.training.disk import checkpoint_room, require_disk
from narrowgauge.training.journal import Bystander, Journal
from narrowgauge.training.layout import layout_of
from narrowgauge.training.memory import Memory, Watch, gib, measured, require_memory
from narrowgauge.training.progress import Display
from narrowgauge.training.response import respond
from narrowgauge.training.saving import Saves, saves_of
from narrowgauge.training.session import Session, build_model, load_model
from narrowgauge.training.start import check_start, start_from_weights
from narrowgauge.training.validate import validation_loss


class OutOfMemory(Exception):
    """The device's memory is too small for a step: exit code 1."""


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
) -> Path:
    """Train, or continue, or find done, the run of a configuration: what `narrowgauge train` runs.

    Args:
        config: a configuration, or nested values for one; None = the embedded default.
        out: the run directory; None = `default_out`.
        console: where progress is shown; None = standard output.
        allow_change: `section.key`s that may have other values than the run began with.

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
    device = machine.choose_device(config.training.device)
    world = world_from(os.environ, torch.cuda.device_count() if device.type == "cuda" else 0)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.device)
    layout = layout_of(config, world.size)
    choose_backend(config.the_recipe(), device_facts(device), config.recipe.backend)
    plan = require_memory(config, device) if layout.size == 1 else None
    machine.limit_memory(device, machine.bytes_of(config.training.memory_limit))
    path = Path(out) if out is not None else default_out(config)
    console = (console or Console()) if world.rank == 0 else Console(quiet=True)
    with (
        stop_requests() as requests,
        Display(console, config.training.steps, config.log.every) as display,
    ):
        requests.nothing_to_save()
        with joined(world, device, config.training.hang_timeout) as crew:
            dataset = _open_data(config, crew, display)
            with lock_run(path, crew.rank, crew.meet):
                requests.save_first()  # until the directory has a status
                _run(config, path, device, layout, plan, dataset, crew, display, requests, allow_change)
    return path


def _run(
    config: Config,
    path: Path,
    device: torch.device,
    layout: Layout,
    plan: Memory | None,
    dataset: Dataset,
    crew: Crew,
    display: Display,
    requests: Requests,
    allow_change: Sequence[str],
) -> None:
    """The run in a directory that is locked."""
    changes: Changes = {}
    is_done = False
    if crew.rank == 0:
        there = RunDirectory(path)
        changes = there.claim(config, allow_change)
        is_done = there.status() == "done" and not changes
        if not is_done:
            there.check_corpus(dataset.digest, allow_change)
    if crew.share(is_done):
        display.say(f"{path} is done; to train again, name another directory with --out")
        return
    directory = (Journal if crew.rank == 0 else Bystander)(path, display.say)
    crew.keep_records_in(path, lambda cause: RunDirectory(path).set_status("failed", cause))
    saves = saves_of(config, directory, display.say, crew)
    try:
        with crew.one_cause():
            requests.nothing_to_save()
            if crew.rank == 0:
                dataset.tokenizer.save(directory.tokenizer)
            run_id = crew.share(directory.run_id(dataset.digest) if crew.rank == 0 else "")
            job = _Job(config, device, dataset, directory, display, plan, crew, saves, run_id)
            session = _start_or_resume(job, changes, Mesh(layout, device))
            _train(job, session, requests)
            _finish(job, session)
    except (Preempted, StoppedEarly) as stop:
        directory.set_status("preempted", str(stop))
        raise
    except Stopped as stop:
        directory.set_status("preempted" if stop.code == 75 else "failed", str(stop))
        raise
    except BaseException as error:
        with suppress(OSError):  # where it went away, what happened to it is the news
            directory.require_there()
            directory.set_status("failed", f"{type(error).__name__}: {error}")
        if machine.is_out_of_memory(error):
            raise OutOfMemory(_how_to_save_memory(config, device, plan)) from error
        raise
    finally:
        saves.end()  # at last: the others know the cause of an end before this one waits for a disk


def _open_data(config: Config, crew: Crew, display: Display) -> Dataset:
    """The tokens: made by the first process, then found made by the others."""
    d = config.data
    crew.at("preparing the data", patience=1000.0)
    if crew.rank > 0:
        crew.meet()
    dataset = open_data(d.source, d.tokenizer, d.weights, display.stage)
    _check_data(config, dataset)
    check_start(config, dataset.tokenizer)
    if crew.rank == 0:
        crew.meet()
    return dataset


def _how_to_save_memory(config: Config, device: torch.device, plan: Memory | None) -> str:
    expected = ""
    if plan is not None:
        expected = (
            f" a step is expected to take {gib(plan.peak)} ({plan.classes()}), beside the program itself and "
            "the data;"
        )
    return (
        f"out of memory on {machine.device_name(device)};{expected} lower training.micro_batch_size = "
        f"{config.training.micro_batch_size}, set --training.recompute true or choose a smaller --model, "
        "and name a new directory with --out"
    )


@dataclass(frozen=True)
class _Job:
    """What stays the same from the first step to the last."""

    config: Config
    device: torch.device
    dataset: Dataset
    directory: Journal
    display: Display
    plan: Memory | None  # what one process would take
    crew: Crew
    saves: Saves
    run_id: str  # what a checkpoint has to be of, to be continued here

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What a reader of the metrics has to know about the run."""
        config, recipe, model = self.config, self.config.the_recipe(), self.config.the_model()
        backend = choose_backend(recipe, device_facts(self.device), config.recipe.backend)
        peak, source = machine.measure_peak(self.device, DTYPES[recipe.compute])
        return {
            "recipe": recipe.name,
            "backend": backend.name,
            "backend_reason": backend.reason,
            "device": machine.device_name(self.device),
            "processes": self.crew.size,
            "torch": torch.__version__,
            "parameters": count_parameters(model),
            "flops_per_token": flops_per_token(model, config.data.sequence_length),
            "peak_flops": peak,
            "peak_source": source,
            "corpus": self.dataset.digest,
        }


def _check_data(config: Config, dataset: Dataset) -> None:
    """Refuse tokens that the model cannot take, before the directory is claimed for this configuration."""
    vocab_size, needed = config.the_model().vocab_size, dataset.tokenizer.vocab_size
    if needed > vocab_size:
        named = config.data.tokenizer != AUTO
        whose = f"tokenizer {config.data.tokenizer!r}" if named else f"data source {config.data.source!r}"
        raise UserError(
            f"{whose} has token ids up to {needed - 1}, beyond model.vocab_size = {vocab_size}; "
            f"set --model.vocab_size {needed}, or a smaller tokenizer"
        )
    count_windows(dataset.train, config.data.sequence_length)
    count_windows(dataset.val, config.data.sequence_length, "held-out")


def _start_or_resume(job: _Job, changes: Changes, mesh: Mesh) -> Session:
    """The state to go on from: the newest valid checkpoint's, or the beginning; then `changes` hold."""
    directory, say, crew = job.directory, job.display.say, job.crew
    crew.at("choosing a checkpoint", START)
    checkpoint, refused = choose_step(directory.checkpoints, job.run_id, crew.control)
    for sentence in refused:
        say(f"passed over: {sentence}")
    crew.at("building the model", START)
    session = Session.begin(job.config, job.device, mesh)
    if checkpoint is None:
        start_from_weights(job.config, session.model)
        say(f"run directory: {directory.path}")
        directory.keep_metrics_until(-1)
    else:
        session.restore(checkpoint, crew.control)
        say(f"continuing {directory.path} after step {session.step}")
        directory.keep_metrics_until(session.step, session.guard.rollbacks)
    require_disk(directory.checkpoints, checkpoint_room(session), job.config.checkpoint.keep)
    directory.adopt(job.config, changes, job.dataset.digest, session.step)
    event = "start" if checkpoint is None else "resume"
    directory.record({"event": event, "step": session.step, **job.facts})
    directory.set_status("running", "")
    return session


def _train(job: _Job, session: Session, requests: Requests) -> None:
    """All steps that are left."""
    directory, steps = job.directory, job.config.training.steps
    if session.step == 0:
        val_loss = _validate(job, session)
        directory.record({"step": 0, "tokens": 0, "val_loss": val_loss})
        job.display.say(f"step {0:>6}/{steps}  val loss {val_loss:.4f}")
    is_warm = False
    while session.step < steps:
        with session.batches(job.dataset.train) as batches:
            _steps(job, session, batches, requests, is_warm)
        is_warm = True


def _steps(job: _Job, session: Session, batches: Loader, requests: Requests, is_warm: bool) -> None:
    """The loop itself, to the end or until the guard has gone back, from where the batches are others."""
    config, directory, say, steps = job.config, job.directory, job.display.say, job.config.training.steps
    last_save = time.monotonic()
    requests.save_first()
    while session.step < steps:
        job.crew.at(f"step {session.step + 1}", 1.0 if is_warm else START)
        line = _measured_step(job, session, batches) if is_warm else _first_step(job, session, batches)
        is_warm = True
        is_last = session.step == steps
        # Read once: a signal may come at any moment, and the stop has to find the save it speaks of.
        late = time.monotonic() - last_save > 60 * config.checkpoint.every_minutes
        found = job.crew.agree(asked=requests.number, late=late)
        asked = "" if is_last or not found["asked"] else signal.Signals(found["asked"]).name
        if is_last or session.step % config.validation.every == 0:
            line["val_loss"] = _validate(job, session)
        directory.record(line)
        job.display.step(line)
        if session.verdict.action == "rollback":
            job.saves.settle()  # the checkpoint to go back to may be the one that is under way
        if respond(session, directory, job.run_id, line["loss"], line["grad_norm"], say, job.crew):
            return
        if is_last or found["late"] or asked or session.step % config.checkpoint.every == 0:
            job.saves.save(session, job.run_id, must=is_last or bool(asked))
            last_save = time.monotonic()
        if asked:
            directory.record({"event": "stop", "step": session.step, "reason": asked})
            raise Preempted(f"{asked} after step {session.step}; the same line continues")


def _first_step(job: _Job, session: Session, batches: Loader) -> dict[str, Any]:
    """The first step of this process, with an account of its memory beside what was expected."""
    on_cpu = job.device.type != "cuda"
    if job.plan is None or (job.config.training.compile and on_cpu):  # compiled operations are not seen
        return _measured_step(job, session, batches)
    with Watch(job.device) as watch:
        line = _measured_step(job, session, batches, watch.after_forward)
    memory, plan = measured(session, watch), job.plan
    facts = {"parameters": memory.parameters, **memory.as_json(), "expected": plan.as_json()}
    job.directory.record({"event": "memory", "step": session.step, **facts})
    on_host = f"; on the host {gib(sum(memory.host.values()))}" if memory.host else ""
    job.display.say(f"memory: {memory.classes()} = {gib(memory.peak)}, expected {gib(plan.peak)}{on_host}")
    limit = machine.bytes_of(job.config.training.memory_limit)
    if limit and memory.peak > limit:
        raise OutOfMemory(
            f"a step took {gib(memory.peak)}, and training.memory_limit is {gib(limit)}; raise it, or see "
            "`narrowgauge plan` for what lowers the peak"
        )
    return line


def _measured_step(
    job: _Job,
    session: Session,
    batches: Loader,
    after_forward: Callable[[torch.Tensor], None] | None = None,
) -> dict[str, Any]:
    """One optimizer step and its line of the metrics."""
    machine.synchronize(job.device)
    start = time.perf_counter()
    every = job.config.gauges_every()
    reads = every and (session.step + 1) % every == 0 and job.crew.rank == 0  # the first tells for all
    gauges = session.make_gauges() if reads else None
    loss, norm, lr = session.train_step(batches, after_forward, gauges)
    if gauges is not None:
        job.directory.record_gauges(gauges.lines(session.step))
    seconds = time.perf_counter() - start  # the step ended with the loss on the host
    tokens = job.config.training.batch_size * job.config.data.sequence_length
    return {
        "step": session.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        "tokens": session.step * tokens,
        "tokens_per_s": tokens / seconds,
        "step_ms": 1000 * seconds,
        "mfu": job.facts["flops_per_token"] * tokens / seconds / job.facts["peak_flops"] / job.crew.size,
        "memory_bytes": machine.peak_memory(job.device),
    }


def _validate(job: _Job, session: Session) -> float:
    job.crew.at(f"the validation after step {session.step}", START)
    c = job.config
    return validation_loss(
        session.engine,
        job.dataset.val,
        c.training.micro_batch_size,
        c.data.sequence_length,
        c.validation.batches,
        c.data.separate_documents,
    )


def _finish(job: _Job, session: Session) -> None:
    """A sample of text, and the last status."""
    log, tokenizer = job.config.log, job.dataset.tokenizer
    if job.crew.rank > 0:
        return
    prompt = log.prompt or _fitting_prompt(job.config, job.dataset)
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    seed = job.config.training.seed
    model = session.model if job.crew.size == 1 else _whole_model(job, session)
    new = generate(model, ids, log.sample_tokens, temperature=0.7, top_k=40, seed=seed)
    sample = tokenizer.decode(new)
    job.directory.record({"event": "done", "step": session.step, "prompt": prompt, "sample": sample})
    job.directory.set_status("done", f"all {session.step} steps")
    job.display.say(f"\nsample, from {prompt!r}:\n{prompt}{sample}\n")


def _whole_model(job: _Job, session: Session) -> Transformer:
    """The model of the last checkpoint, all of it on this process."""
    model = build_model(job.config, job.device)
    load_model(model, job.config, load(job.directory.checkpoints / f"step-{session.step}"))
    return model.eval()


def _fitting_prompt(config: Config, dataset: Dataset) -> str:
    """How a text may begin: a function in source text, else the first words of the held-out part."""
    if config.data.source == "stdlib":
        return "def __init__(self"
    return dataset.tokenizer.decode(dataset.val.streams[0][1:9].tolist())

"""The run, top to bottom: claim the directory, tokens, state, steps, and what is left behind at the end.

The same call starts a run, continues one that stopped, and does nothing for one that is done. After every
step the order is: gauges (where due), metrics line, then (where due) checkpoint. A checkpoint of step n
therefore never exists without the lines up to n, and on return the lines after it are dropped and made again,
to the same digits.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from narrowgauge.checkpoint import SaveError, lock_run
from narrowgauge.data import AUTO, Dataset, Loader, count_windows, open_data, split_sources
from narrowgauge.distributed import START, Crew, Stopped, joined, world_from
from narrowgauge.errors import UserError
from narrowgauge.models import count_parameters, flops_per_token, generate
from narrowgauge.nn import DTYPES
from narrowgauge.recipes import choose_backend, device_facts
from narrowgauge.signals import Preempted, Requests, StoppedEarly, stop_requests
from narrowgauge.training import machine
from narrowgauge.training.config import Config, make_config
from narrowgauge.training.directory import RunDirectory, run_id_of
from narrowgauge.training.memory import Memory, Watch, gib, measured, require_memory
from narrowgauge.training.progress import Display
from narrowgauge.training.session import Session, newest_checkpoint
from narrowgauge.training.start import check_start, start_from_weights
from narrowgauge.training.validate import validation_loss


class Diverged(Exception):
    """Too many steps in a row had a non-finite gradient: exit code 1."""


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
) -> Path:
    """Train, or continue, or find done, the run of a configuration: what `narrowgauge train` runs.

    Args:
        config: a configuration, or nested values for one; None = the embedded default.
        out: the run directory; None = `default_out`.
        console: where progress is shown; None = standard output.

    Returns:
        The run directory.

    Raises:
        UserError: a mistake in the configuration, the data or the directory; nothing was trained.
        Preempted: SIGTERM, SIGINT or SIGUSR1 came; the state is saved.
        StoppedEarly: one of them came before the first step.
        Diverged: more than `guard.max_skips` steps in a row had a non-finite gradient.
        OutOfMemory: a step needs more memory than there is.
        PoisonedError: weights or moments became non-finite; the checkpoints there are untouched.
        SaveError: the last save, or the one that a signal asked for, failed.
    """
    config = config if isinstance(config, Config) else make_config(config or {})
    directory = RunDirectory(Path(out) if out is not None else default_out(config))
    device = machine.choose_device(config.training.device)
    choose_backend(config.the_recipe(), device_facts(device), config.recipe.backend)
    plan = require_memory(config, device)
    machine.limit_memory(device, machine.bytes_of(config.training.memory_limit))
    world = world_from(os.environ, torch.cuda.device_count() if device.type == "cuda" else 0)
    with (
        stop_requests() as requests,
        Display(console or Console(), config.training.steps, config.log.every) as display,
    ):
        requests.nothing_to_save()
        with joined(world, device, config.training.hang_timeout) as crew:
            if crew.size > 1:
                raise UserError("training on several processes is not there yet; start one")
            dataset = open_data(config.data.source, config.data.tokenizer, config.data.weights, display.stage)
            _check_data(config, dataset)
            check_start(config, dataset.tokenizer)
            with lock_run(directory.path, crew.rank, crew.meet):
                requests.save_first()  # until the directory has a status
                directory.claim(config)
                if directory.status() == "done":
                    way_out = "to train again, name another directory with --out"
                    display.say(f"{directory.path} is done; {way_out}")
                    return directory.path
                directory.check_corpus(dataset.digest)
                crew.keep_records_in(directory.path, lambda why: directory.set_status("failed", why))
                _run(_Job(config, device, dataset, directory, display, plan, crew), requests)
    return directory.path


def _run(job: "_Job", requests: Requests) -> None:
    """The whole of it, with a last status for every end."""
    directory = job.directory
    try:
        with job.crew.one_cause():
            requests.nothing_to_save()
            job.dataset.tokenizer.save(directory.tokenizer)
            session = _start_or_resume(job)
            _train(job, session, requests)
            _finish(job, session)
    except (Preempted, StoppedEarly) as stop:
        directory.set_status("preempted", str(stop))
        raise
    except Stopped as stop:
        directory.set_status("preempted" if stop.code == 75 else "failed", str(stop))
        raise
    except BaseException as error:
        directory.set_status("failed", f"{type(error).__name__}: {error}")
        if machine.is_out_of_memory(error):
            raise OutOfMemory(_how_to_save_memory(job.config, job.device)) from error
        raise


def _how_to_save_memory(config: Config, device: torch.device) -> str:
    return (
        f"out of memory on {machine.device_name(device)}; lower training.micro_batch_size = "
        f"{config.training.micro_batch_size}, set --training.recompute true or choose a smaller --model, "
        "and name a new directory with --out"
    )


@dataclass(frozen=True)
class _Job:
    """What stays the same from the first step to the last."""

    config: Config
    device: torch.device
    dataset: Dataset
    directory: RunDirectory
    display: Display
    plan: Memory
    crew: Crew

    @cached_property
    def run_id(self) -> str:
        """What a checkpoint has to be of, to be continued here."""
        return run_id_of(self.config, self.dataset.digest)

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


def _start_or_resume(job: _Job) -> Session:
    """The state to go on from: the newest valid checkpoint's, or the beginning."""
    directory, say = job.directory, job.display.say
    checkpoint, refused = newest_checkpoint(directory.checkpoints, job.run_id)
    for sentence in refused:
        say(f"passed over: {sentence}")
    session = Session.begin(job.config, job.device)
    if checkpoint is None:
        start_from_weights(job.config, session.model)
        say(f"run directory: {directory.path}")
        directory.keep_metrics_until(-1)
    else:
        session.restore(checkpoint)
        say(f"continuing {directory.path} after step {session.step}")
        directory.keep_metrics_until(session.step)
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
    with session.batches(job.dataset.train) as batches:
        _steps(job, session, batches, requests)


def _steps(job: _Job, session: Session, batches: Loader, requests: Requests) -> None:
    """The loop itself."""
    config, directory, steps = job.config, job.directory, job.config.training.steps
    last_save, is_warm = time.monotonic(), False
    requests.save_first()
    while session.step < steps:
        job.crew.at(f"step {session.step + 1}", 1 if is_warm else START)
        line = _measured_step(job, session, batches) if is_warm else _first_step(job, session, batches)
        is_warm = True
        is_last = session.step == steps
        # Agreed once: a signal may come at any moment and to any rank, and the stop has to find the save it
        # speaks of.
        late = time.monotonic() - last_save > 60 * config.checkpoint.every_minutes
        agreed = job.crew.agree(asked=requests.number, due=late)
        asked = signal.Signals(agreed["asked"]).name if agreed["asked"] and not is_last else ""
        if is_last or session.step % config.validation.every == 0:
            line["val_loss"] = _validate(job, session)
        directory.record(line)
        job.display.step(line)
        _guard(job, session, line)
        if is_last or agreed["due"] or asked or session.step % config.checkpoint.every == 0:
            _save(job, session, must=is_last or bool(asked))
            last_save = time.monotonic()
        if asked:
            directory.record({"event": "stop", "step": session.step, "reason": asked})
            raise Preempted(f"{asked} after step {session.step}; the same line continues")


def _first_step(job: _Job, session: Session, batches: Loader) -> dict[str, Any]:
    """The first step of this process, with an account of its memory beside what was expected."""
    if job.config.training.compile and job.device.type != "cuda":  # operations that are compiled are not seen
        return _measured_step(job, session, batches)
    with Watch(job.device) as watch:
        line = _measured_step(job, session, batches, watch.after_forward)
    memory, plan = measured(session, watch), job.plan
    facts = {"parameters": memory.parameters, **memory.as_json(), "expected": plan.as_json()}
    job.directory.record({"event": "memory", "step": session.step, **facts})
    parts = " + ".join(f"{name} {gib(size)}" for name, size in memory.device.items() if size >= 2**16)
    on_host = f"; on the host {gib(sum(memory.host.values()))}" if memory.host else ""
    job.display.say(f"memory: {parts} = {gib(memory.peak)}, expected {gib(plan.peak)}{on_host}")
    limit = machine.bytes_of(job.config.training.memory_limit)
    if limit and memory.peak > limit:
        raise OutOfMemory(
            f"a step took {gib(memory.peak)}, and training.memory_limit is {gib(limit)}; raise it, or see "
            "`narrowgauge plan` for what lowers the peak"
        )
    return line


def _measured_step(
    job: _Job, session: Session, batches: Loader, after_forward: Callable[[], None] | None = None
) -> dict[str, Any]:
    """One optimizer step and its line of the metrics."""
    machine.synchronize(job.device)
    start = time.perf_counter()
    every = job.config.gauges_every()
    gauges = session.make_gauges() if every and (session.step + 1) % every == 0 else None
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
        "mfu": job.facts["flops_per_token"] * tokens / seconds / job.facts["peak_flops"],
        "memory_bytes": machine.peak_memory(job.device),
    }


def _validate(job: _Job, session: Session) -> float:
    job.crew.at(f"the validation after step {session.step}", START)
    c = job.config
    return validation_loss(
        session.model,
        job.dataset.val,
        c.training.micro_batch_size,
        c.data.sequence_length,
        c.validation.batches,
        c.data.separate_documents,
    )


def _guard(job: _Job, session: Session, line: Mapping[str, Any]) -> None:
    """Record a skipped step; stop when there were too many in a row."""
    if not session.skips_in_a_row:
        return
    reason = f"loss {line['loss']}, gradient norm {line['grad_norm']}"
    job.directory.record({"event": "skip", "step": session.step, "reason": reason})
    if session.skips_in_a_row > session.config.guard.max_skips:
        raise Diverged(
            f"{session.skips_in_a_row} steps in a row had a non-finite gradient, the last is {session.step}; "
            "lower optimizer.lr or use a wider recipe"
        )


def _save(job: _Job, session: Session, must: bool) -> None:
    """Publish a checkpoint; a full disk is told loudly, and ends the run only where this save is its last."""
    job.crew.at(f"the save after step {session.step}", START)
    job.directory.sync_metrics()
    try:
        session.save(job.directory.checkpoints, job.run_id)
    except SaveError as error:
        job.display.say(f"NOT SAVED: {error}")
        job.directory.record({"event": "save failed", "step": session.step, "reason": str(error)})
        if must:
            raise
    else:
        job.directory.record({"event": "save", "step": session.step})


def _finish(job: _Job, session: Session) -> None:
    """A sample of text, and the last status."""
    log, tokenizer = job.config.log, job.dataset.tokenizer
    prompt = log.prompt or _fitting_prompt(job.config, job.dataset)
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    seed = job.config.training.seed
    new = generate(session.model, ids, log.sample_tokens, temperature=0.7, top_k=40, seed=seed)
    sample = tokenizer.decode(new)
    job.directory.record({"event": "done", "step": session.step, "prompt": prompt, "sample": sample})
    job.directory.set_status("done", f"all {session.step} steps")
    job.display.say(f"\nsample, from {prompt!r}:\n{prompt}{sample}\n")


def _fitting_prompt(config: Config, dataset: Dataset) -> str:
    """How a text may begin: a function in source text, else the first words of the held-out part."""
    if config.data.source == "stdlib":
        return "def __init__(self"
    return dataset.tokenizer.decode(dataset.val.streams[0][1:9].tolist())

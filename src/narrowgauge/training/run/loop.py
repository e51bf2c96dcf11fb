"""The steps of a run, top to bottom: the state to go on from, one step after the other, the end.

After every step the order is: gauges (where due), metrics line, then (where due) checkpoint. A checkpoint of
step n therefore never exists without the lines up to n, and on return the lines after it are dropped and made
again, to the same digits. Every process of a run goes through here alike: only the first one's record,
display and sample are real, and what they decide they decide together (`Coordinator`).
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from narrowgauge.checkpoint import choose_step, load, require_space_for_run
from narrowgauge.data import Dataset, Loader
from narrowgauge.distributed import START, Coordinator, Mesh
from narrowgauge.models import Transformer, count_parameters, flops_per_token, generate
from narrowgauge.nn import DTYPES
from narrowgauge.recipes import choose_backend, device_facts
from narrowgauge.signals import Preempted, Requests
from narrowgauge.training.config.config import Config
from narrowgauge.training.config.diff import ConfigDiff
from narrowgauge.training.monitor import hardware
from narrowgauge.training.monitor.memory import Memory, measured
from narrowgauge.training.monitor.memory_tracker import MemoryTracker
from narrowgauge.training.monitor.profiler import Profile
from narrowgauge.training.monitor.progress import Display
from narrowgauge.training.run.checkpointing import Checkpointer
from narrowgauge.training.run.init_weights import start_from_weights
from narrowgauge.training.run.recovery import recover
from narrowgauge.training.run.run_writer import RunWriter
from narrowgauge.training.run.validation import validation_loss
from narrowgauge.training.step.build_model import build_model, load_model
from narrowgauge.training.step.trainer import Trainer
from narrowgauge.units import human_bytes, parse_bytes

Taken = tuple[float, float, float]  # loss, gradient norm, learning rate


class OutOfMemory(Exception):
    """The device's memory is too small for a step: exit code 1."""


@dataclass(frozen=True)
class RunContext:
    """What stays the same from the first step to the last."""

    config: Config
    device: torch.device
    dataset: Dataset
    directory: RunWriter
    display: Display
    plan: Memory | None  # what one process would take
    coordinator: Coordinator
    checkpointer: Checkpointer
    run_id: str  # what a checkpoint has to be of, to be continued here
    profile: Profile | None  # of some steps, where it is asked for

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What a reader of the metrics has to know about the run."""
        config, recipe, model = self.config, self.config.resolved_recipe(), self.config.resolved_model()
        backend = choose_backend(recipe, device_facts(self.device), config.recipe.backend)
        peak, source = hardware.measure_peak(self.device, DTYPES[recipe.compute])
        return {
            "recipe": recipe.name,
            "backend": backend.name,
            "backend_reason": backend.reason,
            "device": hardware.device_name(self.device),
            "processes": self.coordinator.size,
            "torch": torch.__version__,
            "parameters": count_parameters(model),
            "flops_per_token": flops_per_token(model, config.data.sequence_length),
            "peak_flops": peak,
            "peak_source": source,
            "corpus": self.dataset.digest,
        }


def start_or_resume(job: RunContext, changes: ConfigDiff, mesh: Mesh) -> Trainer:
    """The state to go on from: the newest valid checkpoint's, or the beginning; then `changes` hold."""
    directory, say, coordinator = job.directory, job.display.say, job.coordinator
    coordinator.progress("choosing a checkpoint", START)
    checkpoint, refused = choose_step(directory.checkpoints, job.run_id, coordinator.control)
    for sentence in refused:
        say(f"passed over: {sentence}")
    coordinator.progress("building the model", START)
    trainer = Trainer.begin(job.config, job.device, mesh)
    if checkpoint is None:
        start_from_weights(job.config, trainer.model)
        say(f"run directory: {directory.path}")
        directory.keep_metrics_until(-1)
    else:
        trainer.restore(checkpoint, coordinator.control)
        say(f"continuing {directory.path} after step {trainer.step}")
        directory.keep_metrics_until(trainer.step, trainer.guard.rollbacks)
    plan = trainer.plan_save(directory.checkpoints, job.run_id, coordinator.control)
    require_space_for_run(directory.checkpoints, plan.space, plan.keep)
    directory.adopt(job.config, changes, job.dataset.digest, trainer.step)
    event = "start" if checkpoint is None else "resume"
    directory.record({"event": event, "step": trainer.step, **job.facts})
    directory.set_status("running", "")
    return trainer


def train(job: RunContext, trainer: Trainer, requests: Requests) -> None:
    """All steps that are left."""
    directory, steps = job.directory, job.config.training.steps
    if trainer.step == 0:
        val_loss = _validate(job, trainer)
        directory.record({"step": 0, "tokens": 0, "val_loss": val_loss})
        job.display.say(f"step {0:>6}/{steps}  val loss {val_loss:.4f}")
    is_warm = False
    while trainer.step < steps:
        with trainer.batches(job.dataset.train) as batches:
            _steps(job, trainer, batches, requests, is_warm)
        is_warm = True


def _steps(job: RunContext, trainer: Trainer, batches: Loader, requests: Requests, is_warm: bool) -> None:
    """The loop itself, to the end or until the guard has gone back, from where the batches are others."""
    config, directory, say, steps = job.config, job.directory, job.display.say, job.config.training.steps
    last_save = time.monotonic()
    requests.save_first()
    while trainer.step < steps:
        job.coordinator.progress(f"step {trainer.step + 1}", 1.0 if is_warm else START)
        line = _measured_step(job, trainer, batches) if is_warm else _first_step(job, trainer, batches)
        is_warm = True
        is_last = trainer.step == steps
        # Read once: a signal may come at any moment, and the stop has to find the save it speaks of.
        late = time.monotonic() - last_save > 60 * config.checkpoint.every_minutes
        found = job.coordinator.all_reduce_max(asked=requests.number, late=late)
        asked = "" if is_last or not found["asked"] else signal.Signals(found["asked"]).name
        if is_last or trainer.step % config.validation.every == 0:
            line["val_loss"] = _validate(job, trainer)
        directory.record(line)
        job.display.step(line)
        if trainer.verdict.action == "rollback":
            job.checkpointer.settle()  # the checkpoint to go back to may be the one that is under way
        if recover(trainer, directory, job.run_id, line["loss"], line["grad_norm"], say, job.coordinator):
            return
        check = config.guard.check_every
        if check and trainer.step % check == 0:
            trainer.check_replicas()
        if is_last or found["late"] or asked or trainer.step % config.checkpoint.every == 0:
            job.checkpointer.save(trainer, job.run_id, must=is_last or bool(asked))
            last_save = time.monotonic()
        if asked:
            directory.record({"event": "stop", "step": trainer.step, "reason": asked})
            raise Preempted(f"{asked} after step {trainer.step}; the same line continues")


def _first_step(job: RunContext, trainer: Trainer, batches: Loader) -> dict[str, Any]:
    """The first step of this process, with an account of its memory beside what was expected."""
    on_cpu = job.device.type != "cuda"
    if job.plan is None or (job.config.training.compile and on_cpu):  # compiled operations are not seen
        return _measured_step(job, trainer, batches)
    with MemoryTracker(job.device) as watch:
        line = _measured_step(job, trainer, batches, watch.after_forward)
    memory, plan = measured(trainer, watch), job.plan
    facts = {"parameters": memory.parameters, **memory.as_json(), "expected": plan.as_json()}
    job.directory.record({"event": "memory", "step": trainer.step, **facts})
    on_host = f"; on the host {human_bytes(sum(memory.host.values()))}" if memory.host else ""
    job.display.say(
        f"memory: {memory.classes()} = {human_bytes(memory.peak)}, expected {human_bytes(plan.peak)}{on_host}"
    )
    limit = parse_bytes(job.config.training.memory_limit)
    if limit and memory.peak > limit:
        raise OutOfMemory(
            f"a step took {human_bytes(memory.peak)}, and training.memory_limit is {human_bytes(limit)}; "
            "raise it, or see `narrowgauge plan` for what lowers the peak"
        )
    return line


def _measured_step(
    job: RunContext,
    trainer: Trainer,
    batches: Loader,
    after_forward: Callable[[torch.Tensor], None] | None = None,
) -> dict[str, Any]:
    """One optimizer step and its line of the metrics."""
    hardware.synchronize(job.device)
    start = time.perf_counter()
    every = job.config.gauges_every()
    reads = every and (trainer.step + 1) % every == 0 and job.coordinator.rank == 0  # the first tells for all
    gauges = trainer.make_gauges() if reads else None
    loss, norm, lr = _profiled(job, trainer, lambda: trainer.train_step(batches, after_forward, gauges))
    if gauges is not None:
        job.directory.record_gauges(gauges.lines(trainer.step))
    seconds = time.perf_counter() - start  # the step ended with the loss on the host
    tokens = job.config.training.batch_size * job.config.data.sequence_length
    return {
        "step": trainer.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        "tokens": trainer.step * tokens,
        "tokens_per_s": tokens / seconds,
        "step_ms": 1000 * seconds,
        "mfu": job.facts["flops_per_token"]
        * tokens
        / seconds
        / job.facts["peak_flops"]
        / job.coordinator.size,
        "memory_bytes": hardware.peak_memory(job.device),
    }


def _profiled(job: RunContext, trainer: Trainer, take: Callable[[], Taken]) -> Taken:
    """Take a step; where it ends the profile that was asked for, say where the time went."""
    if job.profile is None:
        return take()
    number = trainer.step + 1
    result, found = job.profile.step(number, take, is_last=number == job.config.training.steps)
    if found is not None:
        facts = {"step_ms": found.step_ms, "ms": found.classes, "device": found.device}
        job.directory.record({"event": "step time", "step": trainer.step, **facts})
        job.display.say(f"profile: {found}; {job.profile.trace} opens in ui.perfetto.dev")
    return result


def _validate(job: RunContext, trainer: Trainer) -> float:
    job.coordinator.progress(f"the validation after step {trainer.step}", START)
    c = job.config
    return validation_loss(
        trainer.engine,
        job.dataset.val,
        c.training.micro_batch_size,
        c.data.sequence_length,
        c.validation.batches,
        c.data.separate_documents,
    )


def finish(job: RunContext, trainer: Trainer) -> None:
    """A sample of text, and the last status."""
    log, tokenizer = job.config.log, job.dataset.tokenizer
    if job.coordinator.rank > 0:
        return
    prompt = log.prompt or _fitting_prompt(job.config, job.dataset)
    ids = tokenizer.encode(prompt) or [tokenizer.end_of_document]
    seed = job.config.training.seed
    model = trainer.model if job.coordinator.size == 1 else _whole_model(job, trainer)
    new = generate(model, ids, log.sample_tokens, temperature=0.7, top_k=40, seed=seed)
    sample = tokenizer.decode(new)
    job.directory.record({"event": "done", "step": trainer.step, "prompt": prompt, "sample": sample})
    job.directory.set_status("done", f"all {trainer.step} steps")
    job.display.say(f"\nsample, from {prompt!r}:\n{prompt}{sample}\n")


def _whole_model(job: RunContext, trainer: Trainer) -> Transformer:
    """The model of the last checkpoint, all of it on this process."""
    model = build_model(job.config, job.device)
    load_model(model, job.config, load(job.directory.checkpoints / f"step-{trainer.step}"))
    return model.eval()


def _fitting_prompt(config: Config, dataset: Dataset) -> str:
    """How a text may begin: a function in source text, else the first words of the held-out part."""
    if config.data.source == "stdlib":
        return "def __init__(self"
    return dataset.tokenizer.decode(dataset.val.streams[0][1:9].tolist())

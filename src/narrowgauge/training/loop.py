"""The run, top to bottom: claim the directory, tokens, state, steps, and what is left behind at the end.

The same call starts a run, continues one that stopped, and does nothing for one that is done. After every
step the order is: metrics line, then (where due) checkpoint. A checkpoint of step n therefore never exists
without the lines up to n, and on return the lines after it are dropped and made again, to the same digits.
"""

import hashlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from narrowgauge.checkpoint import SaveError, lock_run
from narrowgauge.data import Corpus, count_windows, prepare
from narrowgauge.errors import UserError
from narrowgauge.models import count_parameters, flops_per_token, generate
from narrowgauge.recipes import choose_backend
from narrowgauge.training import machine
from narrowgauge.training.config import Config, make_config, trajectory
from narrowgauge.training.directory import RunDirectory
from narrowgauge.training.progress import Display
from narrowgauge.training.session import COMPUTE_DTYPES, Session, newest_checkpoint
from narrowgauge.training.validate import validation_loss


class Preempted(Exception):
    """The run was asked to stop, has saved, and can be continued: exit code 75."""


class Diverged(Exception):
    """Too many steps in a row had a non-finite gradient: exit code 1."""


def default_out(config: Config) -> Path:
    """The run directory when none is named: runs/MODEL-SOURCE-RECIPE."""
    source = Path(config.data.source).stem or "data"
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
        Diverged: more than `guard.max_skips` steps in a row had a non-finite gradient.
        SaveError: the last save, or the one that a signal asked for, failed.
    """
    config = config if isinstance(config, Config) else make_config(config or {})
    directory = RunDirectory(Path(out) if out is not None else default_out(config))
    console = console or Console()
    device = machine.choose_device(config.training.device)
    choose_backend(config.the_recipe(), device.type, config.recipe.backend)
    with Display(console, config.training.steps, config.log.every) as display:
        directory_is_new = not directory.path.exists()
        corpus = prepare(config.data.source, config.data.tokenizer, progress=display.stage)
        _check_corpus(config, corpus)
        with lock_run(directory.path), _stop_requests() as requests:
            directory.claim(config)
            if directory.status() == "done":
                display.say(f"{directory.path} is done; to train again, name another directory with --out")
                return directory.path
            directory.check_corpus(corpus.digest)
            corpus.tokenizer.save(directory.tokenizer)
            session = _start_or_resume(config, device, directory, corpus, display)
            if directory_is_new:
                display.say(f"run directory: {directory.path}")
            try:
                _train(session, corpus, directory, display, requests)
            except Preempted as stop:
                directory.set_status("preempted", str(stop))
                raise
            except BaseException as error:
                directory.set_status("failed", f"{type(error).__name__}: {error}")
                raise
    return directory.path


def _check_corpus(config: Config, corpus: Corpus) -> None:
    """Refuse tokens that the model cannot take, before the directory is claimed for this configuration."""
    vocab_size, needed = config.the_model().vocab_size, corpus.tokenizer.vocab_size
    if needed > vocab_size:
        raise UserError(
            f"tokenizer {config.data.tokenizer!r} has token ids up to {needed - 1}, beyond "
            f"model.vocab_size = {vocab_size}; set --model.vocab_size {needed}, or a smaller tokenizer"
        )
    count_windows(corpus.train, config.data.sequence_length)
    count_windows(corpus.val, config.data.sequence_length, "held-out")


def _run_id(config: Config, corpus: Corpus) -> str:
    text = json.dumps([trajectory(config), corpus.digest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _start_or_resume(
    config: Config, device: torch.device, directory: RunDirectory, corpus: Corpus, display: Display
) -> Session:
    """The state to go on from: the newest valid checkpoint's, or the beginning."""
    checkpoint, refused = newest_checkpoint(directory.checkpoints, _run_id(config, corpus))
    for sentence in refused:
        display.say(f"passed over: {sentence}")
    session = Session.begin(config, device)
    was_here = directory.metrics.exists()
    if checkpoint is not None:
        session.restore(checkpoint)
        display.say(f"continuing {directory.path} after step {session.step}")
    directory.keep_metrics_until(session.step if checkpoint is not None else -1)
    event = "resume" if was_here and checkpoint is not None else "start"
    directory.record({"event": event, "step": session.step, **_facts(config, device, corpus)})
    directory.set_status("running", "")
    return session


def _facts(config: Config, device: torch.device, corpus: Corpus) -> dict[str, Any]:
    """What a reader of the metrics has to know about the run."""
    recipe, model = config.the_recipe(), config.the_model()
    backend = choose_backend(recipe, device.type, config.recipe.backend)
    peak, source = machine.measure_peak(device, COMPUTE_DTYPES[recipe.compute])
    return {
        "recipe": recipe.name,
        "backend": backend.name,
        "backend_reason": backend.reason,
        "device": machine.device_name(device),
        "torch": torch.__version__,
        "parameters": count_parameters(model),
        "flops_per_token": flops_per_token(model, config.data.sequence_length),
        "peak_flops": peak,
        "peak_source": source,
        "corpus": corpus.digest,
    }


def _train(
    session: Session, corpus: Corpus, directory: RunDirectory, display: Display, requests: list[str]
) -> None:
    """All steps that are left, and what belongs to the end of a run."""
    config, run_id = session.config, _run_id(session.config, corpus)
    flops = flops_per_token(config.the_model(), config.data.sequence_length)
    peak = machine.measure_peak(session.device, session.model.compute_dtype)[0]
    tokens_per_step = config.training.batch_size * config.data.sequence_length
    if session.step == 0:
        val_loss = _validate(session, corpus)
        directory.record({"step": 0, "tokens": 0, "val_loss": val_loss})
        display.say(f"step {0:>6}/{config.training.steps}  val loss {val_loss:.4f}")
    last_save = time.monotonic()
    while session.step < config.training.steps:
        machine.synchronize(session.device)
        start = time.perf_counter()
        loss, norm, lr = session.train_step(corpus)
        seconds = time.perf_counter() - start
        line = {
            "step": session.step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": session.step * tokens_per_step,
            "tokens_per_s": tokens_per_step / seconds,
            "step_ms": 1000 * seconds,
            "mfu": flops * tokens_per_step / seconds / peak,
            "memory_bytes": machine.peak_memory(session.device),
        }
        is_last = session.step == config.training.steps
        # Read once: a signal may come at any moment, and the stop has to find the save it speaks of.
        asked = "" if is_last or not requests else requests[0]
        if is_last or session.step % config.validation.every == 0:
            line["val_loss"] = _validate(session, corpus)
        directory.record(line)
        display.step(line)
        _guard(session, directory, loss, norm)
        due = time.monotonic() - last_save > 60 * config.checkpoint.every_minutes
        if is_last or due or asked or session.step % config.checkpoint.every == 0:
            _save(session, directory, display, run_id, must=is_last or bool(asked))
            last_save = time.monotonic()
        if asked:
            directory.record({"event": "stop", "step": session.step, "reason": asked})
            raise Preempted(f"{asked} after step {session.step}; the same line continues")
    _finish(session, corpus, directory, display)


def _validate(session: Session, corpus: Corpus) -> float:
    c = session.config
    return validation_loss(
        session.model, corpus.val, c.training.micro_batch_size, c.data.sequence_length, c.validation.batches
    )


def _guard(session: Session, directory: RunDirectory, loss: float, norm: float) -> None:
    """Record a skipped step; stop when there were too many in a row."""
    if not session.skips_in_a_row:
        return
    directory.record({"event": "skip", "step": session.step, "reason": f"loss {loss}, gradient norm {norm}"})
    if session.skips_in_a_row > session.config.guard.max_skips:
        raise Diverged(
            f"{session.skips_in_a_row} steps in a row had a non-finite gradient, the last is {session.step}; "
            "lower optimizer.lr or use a wider recipe"
        )


def _save(session: Session, directory: RunDirectory, display: Display, run_id: str, must: bool) -> None:
    """Publish a checkpoint; a full disk is told loudly, and ends the run only where this save is its last."""
    directory.sync_metrics()
    try:
        session.save(directory.checkpoints, run_id)
    except SaveError as error:
        display.say(f"NOT SAVED: {error}")
        directory.record({"event": "save failed", "step": session.step, "reason": str(error)})
        if must:
            raise
    else:
        directory.record({"event": "save", "step": session.step})


def _finish(session: Session, corpus: Corpus, directory: RunDirectory, display: Display) -> None:
    """A sample of text, and the last status."""
    log = session.config.log
    prompt = log.prompt or _fitting_prompt(session.config, corpus)
    ids = corpus.tokenizer.encode(prompt) or [corpus.tokenizer.end_of_document]
    new = generate(
        session.model, ids, log.sample_tokens, temperature=0.7, top_k=40, seed=session.config.training.seed
    )
    sample = corpus.tokenizer.decode(new)
    directory.record({"event": "done", "step": session.step, "prompt": prompt, "sample": sample})
    directory.set_status("done", f"all {session.step} steps")
    display.say(f"\nsample, from {prompt!r}:\n{prompt}{sample}\n")


def _fitting_prompt(config: Config, corpus: Corpus) -> str:
    """How a text may begin: a function in source text, else the first words of the held-out part."""
    if config.data.source == "stdlib":
        return "def"
    return corpus.tokenizer.decode(corpus.val[1:9].tolist())


@contextmanager
def _stop_requests() -> Iterator[list[str]]:
    """A list that gets the name of a signal when one asks the run to stop; a second one stops it at once."""
    requests: list[str] = []

    def ask(number: int, frame: FrameType | None) -> None:
        requests.append(signal.Signals(number).name)
        if len(requests) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    previous = {n: signal.signal(n, ask) for n in numbers}
    try:
        yield requests
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)

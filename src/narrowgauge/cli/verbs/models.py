"""`sample`, `eval`, `export`, `import`: uses of a trained model."""

import argparse
from math import isfinite
from pathlib import Path

from rich.console import Console

from narrowgauge.distributed import Engine
from narrowgauge.errors import UserError, unknown
from narrowgauge.models import generate
from narrowgauge.runs import TrainedRun, bits_per_byte, open_run, validation_loss
from narrowgauge.runs.choices import TASKS
from narrowgauge.runs.loop.two_losses import keep_losses, two_losses
from narrowgauge.runs.monitor.hardware import choose_device
from narrowgauge.runs.monitor.progress import Display
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.export import export_run, import_model
from narrowgauge.runs.use.hellaswag import evaluate as score_hellaswag
from narrowgauge.runs.use.lm_eval import harness_scores
from narrowgauge.runs.use.trained_model import run_data


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def sample(options: argparse.Namespace) -> None:
    """Print a prompt and a model's continuation."""
    trained = open_run(options.run, options.device, options.tokenizer)
    tokenizer, ids = trained.tokenizer, trained.prompt_ids(options.prompt)
    new = generate(
        trained.model,
        ids,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_id=tokenizer.end_of_document,
        cache=trained.is_tokenwise if options.cache == "auto" else options.cache == "on",
    )
    print(options.prompt + tokenizer.decode_after(ids, new))


def evaluate(options: argparse.Namespace) -> None:
    """Print losses or scores of a model."""
    for name in ("batches", "sequence_length", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1; leave it out")
    task, _, detail = options.task.partition(":")
    if task == "lm-eval" and detail:
        device = choose_device(options.device).type
        names = detail.split(",")
        for name, scores in harness_scores(
            options.run, names, device, options.limit, options.task_folder
        ).items():
            numbers = [f"{k.partition(',')[0]} {v:.4f}" for k, v in scores.items() if isinstance(v, float)]
            _print(f"{options.run}: {name}, {', '.join(numbers)}")
        return
    trained = open_run(options.run, options.device, options.tokenizer)
    if task == "hellaswag" and detail:
        score = score_hellaswag(trained, Path(detail), options.limit)
        text = f"{score.examples} examples, acc {score.acc:.4f}, acc_norm {score.acc_norm:.4f}"
        _print(f"{options.run}: step {trained.step}, hellaswag, {text}")
    elif options.task == "val":
        _evaluate_text(options, trained)
    else:
        raise unknown("task", options.task, TASKS)


def _evaluate_text(options: argparse.Namespace, trained: TrainedRun) -> None:
    with Display(Console(), 1, 1) as display:
        dataset = run_data(trained, options.data, display.stage)
    length = options.sequence_length or trained.config.data.sequence_length
    if options.forward:
        losses = two_losses(trained, options.forward, dataset.val, length, options.batches)
        asked = {"data": options.data, "sequence_length": length, "batches": options.batches}
        keep_losses(options.run, trained.step, losses, asked)
        text = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        _print(f"{options.run}: step {trained.step}, validation loss by forward pass: {text}")
        return
    size, separate_documents = (
        trained.config.training.micro_batch_size,
        trained.config.data.separate_documents,
    )
    sequences = trained.held_out_sequences(options.batches)
    engine, val = Engine.alone(trained.model), dataset.val
    windows = (size, length, None, separate_documents, sequences)
    loss = validation_loss(engine, trained.go_to_sample, val, *windows).mean
    bits = bits_per_byte(loss, dataset.tokenizer, val, size, length, sequences, separate_documents)
    per_byte = f", {bits:.4f} bits per byte" if isfinite(bits) else ""  # token ids have no bytes
    text = f"validation loss {loss:.4f} nats per token{per_byte}"
    _print(f"{options.run}: step {trained.step}, {text}")


def export(options: argparse.Namespace) -> None:
    """Write a model for another program."""
    exported = export_run(options.run, options.to, options.out, options.dtype, calibrate=options.calibrate)
    _print(f"{options.out}: {options.run} after step {exported.run.step}, as {options.to}")
    for remark in exported.remarks:
        _print(remark)


def import_(options: argparse.Namespace) -> None:
    """Write a model of another program as a run directory."""
    run = import_model(options.path, options.out, options.tokenizer, options.data)
    event = RunDirectory(run).lines()[0]
    _print(f"run directory: {run}")
    _print(f"the weights were stored in {event['precision']} ({event['kind']}) and are kept in fp32")
    _print(f"to continue training: narrowgauge train --model.weights {run} --data SOURCE --out NEW")

"""`sample`, `eval`, `export`, `import`: what can be done with a trained model."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from narrowgauge.distributed import Engine
from narrowgauge.errors import UserError, unknown
from narrowgauge.models import generate
from narrowgauge.runs import TrainedRun, bits_per_byte, open_run, validation_loss
from narrowgauge.runs.loop.two_losses import keep_losses, two_losses
from narrowgauge.runs.monitor.hardware import choose_device
from narrowgauge.runs.monitor.progress import Display
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.export import TARGETS, export_run, import_model
from narrowgauge.runs.use.hellaswag import evaluate
from narrowgauge.runs.use.lm_eval import harness_scores
from narrowgauge.runs.use.run_data import run_data

Verb = Callable[[str, Callable[[argparse.Namespace], None]], argparse.ArgumentParser]
_TASKS = ("val", "hellaswag:FILE", "lm-eval:TASK,...")


def add_exchange_verbs(verb: Verb) -> None:
    """Add the verbs to a parser; `verb(name, action)` adds one."""
    p = verb("sample", _sample)
    _add_model(p)
    p.add_argument("--prompt", required=True, help="how the text begins")
    p.add_argument("--tokens", type=int, default=200, help="length (200)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest (0.8)")
    p.add_argument("--top-k", type=int, default=40, help="draw among this many likeliest (40)")
    p.add_argument("--top-p", type=float, default=1.0, help="draw among the fewest that hold this share (1)")
    p.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    p.add_argument(
        "--cache",
        choices=("auto", "on", "off"),
        default="auto",
        help="keep keys and values of the tokens before; auto: where the recipe scales each token by itself",
    )
    p = verb("eval", _eval)
    _add_model(p)
    p.add_argument("--task", default="val", help=f"{' | '.join(_TASKS)} (val: held-out text)")
    p.add_argument("--data", metavar="SOURCE", help="val: other text than the run's")
    p.add_argument("--batches", type=int, help="val: how many batches (all)")
    p.add_argument("--sequence-length", type=int, help="val: tokens of a sequence (the run's)")
    p.add_argument("--forward", metavar="R", help="val: under this recipe's forward pass, too")
    p.add_argument("--limit", type=int, help="other tasks: how many examples (all)")
    p.add_argument("--task-folder", type=Path, help="lm-eval: YAML files of further tasks")
    p = verb("export", _export)
    p.add_argument("run", metavar="RUN", type=Path)
    p.add_argument("--to", required=True, metavar="FORMAT", help=" | ".join(TARGETS))
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    p.add_argument("--dtype", help="fp32, bf16 or fp16 (fp32; compressed-tensors: bf16)")
    p.add_argument("--shard-gb", type=float, default=5.0, help="size of a safetensors file (5)")
    p = verb("import", _import)
    p.add_argument("path", metavar="PATH", type=Path, help="a folder of Hugging Face's, or an llm.c model")
    p.add_argument("--out", required=True, type=Path, metavar="RUN", help="a new run directory")
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json (that of the model)")
    p.add_argument("--data", metavar="SOURCE", default="stdlib", help="text to evaluate it on (stdlib)")


def _add_model(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", metavar="RUN", type=Path, help="a run, a Hugging Face folder or an llm.c model")
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json (that of the model)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _sample(options: argparse.Namespace) -> None:
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


def _eval(options: argparse.Namespace) -> None:
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
        score = evaluate(trained, Path(detail), options.limit)
        text = f"{score.examples} examples, acc {score.acc:.4f}, acc_norm {score.acc_norm:.4f}"
        _print(f"{options.run}: step {trained.step}, hellaswag, {text}")
    elif options.task == "val":
        _evaluate_text(options, trained)
    else:
        raise unknown("task", options.task, _TASKS)


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
    loss = validation_loss(engine, trained.go_to_sample, val, *windows)
    bits = bits_per_byte(loss, dataset.tokenizer, val, size, length, sequences, separate_documents)
    text = f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte"
    _print(f"{options.run}: step {trained.step}, {text}")


def _export(options: argparse.Namespace) -> None:
    size = options.shard_gb * 1e9
    if not 1 <= size < 2**63:
        raise UserError(f"--shard-gb {options.shard_gb} must be the size of a file, such as 5")
    trained = export_run(options.run, options.to, options.out, options.dtype, int(size))
    _print(f"{options.out}: {options.run} after step {trained.step}, as {options.to}")


def _import(options: argparse.Namespace) -> None:
    run = import_model(options.path, options.out, options.tokenizer, options.data)
    event = RunDirectory(run).lines()[0]
    _print(f"run directory: {run}")
    _print(f"the weights were found in {event['precision']} ({event['kind']}), and are kept in fp32")
    _print(f"to train on from it: narrowgauge train --model.weights {run} --data SOURCE --out NEW")

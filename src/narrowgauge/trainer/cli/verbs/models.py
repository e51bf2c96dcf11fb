"""`prepare` converts documents to token files; `import`, `export`, `served`, `sample`, `eval` take models."""

from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

from narrowgauge.system.errors import unknown
from narrowgauge.trainer import data as corpora
from narrowgauge.trainer import models, runs  # each name is imported when it is used
from narrowgauge.trainer.laboratory.arguments import RUN, Console, Count, File, Folder, Form, Run, Source
from narrowgauge.trainer.runs.choices import EXPORT_FORMATS, RECORDED, SERVERS, TASKS

Tokenizer = Annotated[File | None, "a tokenizer.json (the model's)"]
OWN = "narrowgauge"  # the layout with a manifest


def sample(
    run: Run,
    *,
    tokenizer: Tokenizer = None,
    device: Annotated[str, "auto, cpu or cuda"] = "auto",
    prompt: Annotated[str, "the beginning of the text"],
    tokens: Annotated[int, "number of tokens to generate"] = 200,
    temperature: Annotated[float, "0: always the likeliest token"] = 0.8,
    top_k: Annotated[int, "sample from the N most likely tokens"] = 40,
    top_p: Annotated[float, "sample from the top tokens of this share"] = 1.0,
    seed: Annotated[int, "seed of the sampling"] = 0,
    cache: Annotated[
        Literal["auto", "on", "off"],
        "cache keys and values; auto: if the recipe scales each token separately",
    ] = "auto",
) -> None:
    """Generate text with a run or a model of another program.

    narrowgauge sample runs/mine --prompt 'def main'
    """
    trained = runs.open_run(run, device, tokenizer)
    new = models.generate(
        trained.model,
        trained.prompt_ids(prompt),
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_id=trained.tokenizer.end_of_document,
        cache=trained.is_tokenwise if cache == "auto" else cache == "on",
    )
    print(prompt + trained.tokenizer.decode_after(trained.prompt_ids(prompt), new))


def eval_(
    run: Run,
    *,
    tokenizer: Tokenizer = None,
    device: Annotated[str, "auto, cpu or cuda"] = "auto",
    task: Annotated[str, f"{' | '.join(TASKS)}; val: held-out text"] = "val",
    data: Annotated[Source | None, "val: text, if not the run's"] = None,
    batches: Annotated[Count | None, "val: number of batches (all)"] = None,
    sequence_length: Annotated[Count | None, "val: tokens per sequence (the run's)"] = None,
    forward: Annotated[str | None, Form("R"), "val: also evaluate with this recipe's forward pass"] = None,
    limit: Annotated[Count | None, "other tasks: number of examples (all)"] = None,
    task_folder: Annotated[Path | None, "lm-eval: folder with YAML files of more tasks"] = None,
    console: Console,
) -> None:
    """Evaluate a run or a model of another program: losses and scores.

    narrowgauge eval runs/mine --task val --batches 8
    """
    from narrowgauge.trainer.runs.loop.validation import bits_per_byte, held_out_loss, keep_losses, two_losses
    from narrowgauge.trainer.runs.monitor.progress import Display
    from narrowgauge.trainer.runs.use.tasks import evaluate, harness_scores
    from narrowgauge.trainer.runs.use.trained_model import held_out_batches, run_data

    kind, _, detail = task.partition(":")
    if kind == "lm-eval" and detail:
        found = harness_scores(run, detail.split(","), runs.choose_device(device).type, limit, task_folder)
        for name, scores in found.items():
            numbers = [f"{k.partition(',')[0]} {v:.4f}" for k, v in scores.items() if isinstance(v, float)]
            print(f"{run}: {name}, {', '.join(numbers)}")
        return
    trained = runs.open_run(run, device, tokenizer)
    if kind == "hellaswag" and detail:
        score = evaluate(trained, Path(detail), limit)
        text = f"{score.examples} examples, acc {score.acc:.4f}, acc_norm {score.acc_norm:.4f}"
        print(f"{run}: step {trained.step}, hellaswag, {text}")
        return
    if task != "val":
        raise unknown("task", task, TASKS)
    with Display(console, 1, 1) as display:
        dataset = run_data(trained, data, display.stage)
    length = sequence_length or trained.config.data.sequence_length
    if forward:
        losses = two_losses(trained, forward, dataset.val, length, batches)
        asked = {"data": data, "sequence_length": length, "batches": batches}
        keep_losses(run, trained.step, losses, asked)
        text = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        print(f"{run}: step {trained.step}, validation loss by forward pass: {text}")
        return
    loss = held_out_loss(trained, dataset.val, length, batches)
    held_out = held_out_batches(trained.config, dataset.val, length, batches)
    bits = bits_per_byte(loss, dataset.tokenizer, held_out)
    per_byte = f", {bits:.4f} bits per byte" if isfinite(bits) else ""  # token ids have no bytes
    print(f"{run}: step {trained.step}, validation loss {loss:.4f} nats per token{per_byte}")


def export(
    run: Annotated[Path, RUN, "a run directory"],
    *,
    to: Annotated[str, Form("FORMAT"), " | ".join(EXPORT_FORMATS)],
    out: Annotated[Folder, "a new folder"],
    dtype: Annotated[str | None, "fp32, bf16 or fp16 (fp32; bf16 for quantized weights)"] = None,
    calibrate: Annotated[
        Source | None, f"store activation scales: measured on a text, or '{RECORDED}' by delayed scaling"
    ] = None,
) -> None:
    """Write a run's model for other programs.

    narrowgauge export runs/mine --to hf --out exported
    narrowgauge export runs/mine --to compressed-tensors --calibrate text.txt --out served
    """
    from narrowgauge.trainer.runs.use.export import export_run

    trained, remarks = export_run(run, to, out, dtype, calibrate)
    print(f"{out}: {run} after step {trained.step}, as {to}")
    for remark in remarks:
        print(remark)


def import_(
    path: Annotated[
        Path, Form("PATH", is_positional=True), "a Hugging Face folder, or a file of llm.c or GGUF"
    ],
    *,
    out: Annotated[Path, Form("RUN"), "a new run directory"],
    tokenizer: Tokenizer = None,
    data: Annotated[Source, "text to evaluate it on"] = "stdlib",
) -> None:
    """Turn a model of another program into a run.

    narrowgauge import gpt2/ --out runs/gpt2
    narrowgauge import model.gguf --out runs/theirs --data text.txt
    """
    from narrowgauge.trainer.runs.run_directory import RunDirectory
    from narrowgauge.trainer.runs.use.export import import_model

    run = import_model(path, out, tokenizer, data)
    event = RunDirectory(run).lines()[0]
    print(f"run directory: {run}")
    print(f"the weights were stored in {event['precision']} ({event['kind']}) and are kept in fp32")
    print(f"to continue training: narrowgauge train --model.weights {run} --data SOURCE --out NEW")


_READ = "; ".join(f"{server}: {' | '.join(formats)}" for server, formats in SERVERS.items())


def served(
    run: Run,
    *,
    with_: Annotated[str, Form("SERVER"), " | ".join(SERVERS)],
    to: Annotated[str | None, Form("FORMAT"), f"what the server reads ({_READ}; the first)"] = None,
    files: Annotated[Folder | None, "serve this export of the run (a new one)"] = None,
    data: Annotated[Source | None, "text, if not the run's"] = None,
    sequences: Annotated[int, "number of held-out sequences"] = 16,
    sequence_length: Annotated[int | None, "tokens per sequence (the run's)"] = None,
    margin: Annotated[float, "largest difference of the loss that is equal"] = 0.01,
    page: Annotated[File | None, "also write the result as a page (HTML)"] = None,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Compare a run with itself behind a server; exit code 1 if they differ.

    narrowgauge served runs/mine --with llama.cpp
    """
    from json import dumps

    from markupsafe import Markup
    from rich.console import Console

    from narrowgauge.system.files import write_whole
    from narrowgauge.trainer.report.page.html import page as html_page
    from narrowgauge.trainer.runs.monitor.progress import Display
    from narrowgauge.trainer.runs.use import served as serving

    with Display(Console(stderr=True), 1, 1) as display:
        found = serving.served(run, with_, to, files, data, sequences, sequence_length, margin, display.stage)
    if page is not None:
        title = f"Server and trainer: {found.verdict}"
        text = Markup("<h1>{}</h1><pre>{}</pre>").format(title, found.table())
        write_whole(page, html_page(title=title, content=text))
    print(dumps(found.as_json(), indent=1) if json else found.table())
    return 0 if found.verdict == serving.EQUAL else 1


def prepare(
    source: Annotated[str, Form("SOURCE", is_positional=True)],
    *,
    out: Annotated[Folder, "the folder of the corpus"],
    tokenizer: Annotated[str | None, Form("T")] = None,
    workers: Annotated[int | None, Form("N")] = None,
    text_key: Annotated[str, Form("KEY"), "key or column of the text"] = "text",
    val_fraction: Annotated[float, Form("F"), "share held out"] = 0.1,
    layout: Annotated[str, Form("L")] = OWN,
    name: Annotated[str | None, Form("NAME")] = None,
    dedup: Annotated[bool, "leave out repeated documents"] = False,
    tolerant: Annotated[float | None, Form("SHARE", bare=0.01)] = None,
    console: Console,
) -> None:
    """Turn documents into token files.

    narrowgauge prepare my-texts/ --out data/mine --tokenizer bpe-4096

    Args:
        source: stdlib, a directory, a glob, .txt, .jsonl, .parquet, a Wikipedia pages-articles .xml (all but
            .parquet also in .gz, .bz2, .zst), or hf:NAME[:CONFIG[:SPLIT]].
        tokenizer: Bytes, bpe-N (learned from the text) or a tokenizer file (bpe-4096).
        workers: Processes that read and encode (all cores, if there is enough text).
        layout: Layout of the token files: narrowgauge (the only one with a manifest), llmc, megatron.
        name: llmc: prefix of the file names (text); megatron: one .bin and .idx with all documents, held-out
            ones last, such as wikipedia_text_document (without it, a pair for each part).
        tolerant: Skip up to this share of records that are not text (0.01); without it, the first is an
            error.
    """
    from narrowgauge.trainer.runs.monitor.progress import Display

    if layout not in (layouts := (OWN, *corpora.TOKEN_LAYOUTS)):
        raise unknown("layout", layout, layouts)
    corpora.check_name(name, layout)
    chosen = corpora.Options(val_fraction, dedup, tolerant, text_key)
    with Display(console, 1, 1) as display:
        own = out if layout == OWN else None
        corpus = corpora.prepare(source, tokenizer, own, display.stage, options=chosen, workers=workers)
        if layout != OWN:
            corpora.export_tokens(corpora.open_data(str(corpus.directory)), layout, out, name)
    facts = corpus.manifest
    lines = [
        f"train  {facts.train_documents:>12,} documents  {facts.train_tokens:>15,} tokens",
        f"val    {facts.val_documents:>12,} documents  {facts.val_tokens:>15,} tokens",
    ]
    if facts.duplicates:
        lines.append(f"left out {facts.duplicates:,} duplicates")
    if facts.rejected:
        lines.append(f"set aside {facts.rejected:,} records: {corpus.directory / 'rejected.jsonl'}")
    lines.append(f"train on it: narrowgauge train --data {out}")
    display.log("\n".join(lines))

"""The options of each verb; `verbs` has the help texts of the verbs.

This imports no torch, so help and usage errors appear at once.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from narrowgauge import cluster, data, models  # each name is imported when it is used
from narrowgauge.cli.parsing.key_parser import KeyParser
from narrowgauge.cli.parsing.options import add_config_options, checked, positive_integer
from narrowgauge.cli.parsing.parser import add_doctor_options, command_parser
from narrowgauge.cli.parsing.verbs import grouped
from narrowgauge.exchange import SOURCES, TARGETS
from narrowgauge.runs.choices import EXPORT_FORMATS, PROFILED, RECORDED, SERVERS, TASKS

OWN = "narrowgauge"  # the layout of `prepare` with a manifest
HEAD = "head"
FOLDER = Path("runs")


def _train(p: KeyParser) -> None:
    p.add_argument(
        "--allow-change",
        metavar="KEY,...",
        default="",
        help="allow these keys to differ from the run in --out",
    )
    p.add_argument(
        "--profile",
        metavar="STEPS",
        nargs="?",
        type=positive_integer,
        const=PROFILED,
        default=0,
        help=f"profile STEPS steps ({PROFILED}) into DIR/profile, for Perfetto",
    )
    text = "begin at a checkpoint of RUN (the newest)"
    p.add_argument("--branch", metavar="RUN[@STEP]", help=text)
    _watched(p)


def _watched(p: KeyParser) -> None:
    """Add the option of the verbs that train."""
    p.add_argument("--watch", action="store_true", help="show a live page meanwhile (narrowgauge watch)")


def _compare(p: KeyParser) -> None:
    p.add_argument("--recipes", default="", metavar="A,B,C", help="recipes; the first is the reference")
    p.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="add a variant: a name and values of any keys; repeatable",
    )
    p.add_argument(
        "--seeds",
        default="",
        metavar="N|A,B,C",
        help="number of seeds per variant, or the seeds (that of --seed)",
    )
    p.add_argument(
        "--gate",
        metavar="GAP",
        help="largest accepted gap, in nats (0.01) or percent (0.25%%); exit code 1 if a variant exceeds it",
    )
    p.add_argument(
        "--expected", action="store_true", help="compare each gap with its forecast, to find faults"
    )
    p.add_argument(
        "--rungs",
        metavar="STEPS,...",
        help="lengths at which to compare; each branches off one trunk and decays the learning rate",
    )
    p.add_argument("--arms", default="", metavar="A,B", help="run only these arms of the file's [arms] table")
    p.add_argument("--jobs", type=positive_integer, metavar="N", help="number of parallel runs (1)")
    p.add_argument("--dry-run", action="store_true", help="print runs, tokens and hours, and exit")
    _watched(p)


def _plan(p: KeyParser) -> None:
    _cluster_option(p, f"{', '.join(cluster.cluster_names())}, or a .toml file")
    p.add_argument("--devices", metavar="N", default="1", help="number of devices (1)")
    p.add_argument("--tokens", metavar="N", help="training tokens, as in 300B (default: from the steps)")
    p.add_argument("--price", metavar="P", help="price of a device-hour, such as 2.50USD (the cluster's)")
    p.add_argument(
        "--gap",
        action="store_true",
        help="forecast the recipe's loss gap and compare it with the time saved",
    )
    p.add_argument("--json", action="store_true", help="print JSON")


def _named_model(name: str) -> str:
    """The name of a model, which exists."""
    models.model_config(name)
    return name


def _cluster_option(p: KeyParser, text: str) -> None:
    """Add the option that names a cluster, checked before the verb imports what it computes with."""
    p.add_argument("--cluster", metavar="SPEC", type=checked(cluster.cluster_name), help=text)


def _bench(p: KeyParser) -> None:
    p.add_argument("--rounds", metavar="N", default="5", help="timed steps of each program (5)")
    p.add_argument("--peers", metavar="A,B", help="programs to compare with; none: time narrowgauge only")
    p.add_argument("--json", metavar="FILE", type=Path, help="write all figures to FILE")


def _scaling(p: KeyParser) -> None:
    p.add_argument("--procs", metavar="N,...", default="", help="numbers of processes, ascending")
    p.add_argument("--seconds", type=float, default=5.0, metavar="N", help="seconds per number and mode (5)")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that share the seconds (3)")
    p.add_argument("--json", action="store_true", help="print JSON (scaling.json) instead of a table")
    p.add_argument("--rank-of", type=Path, metavar="DIR", help=argparse.SUPPRESS)  # for its own processes


_SOURCES = (
    "stdlib, a directory, a glob, .txt, .jsonl, .parquet, a Wikipedia pages-articles .xml (all but .parquet "
    "also in .gz, .bz2, .zst), or hf:NAME[:CONFIG[:SPLIT]]"
)


def _prepare(p: KeyParser) -> None:
    layouts = ", ".join((OWN, *data.TOKEN_LAYOUTS))
    p.add_argument("source", metavar="SOURCE", help=_SOURCES)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of the corpus")
    p.add_argument(
        "--tokenizer",
        metavar="T",
        help=f"bytes, bpe-N (learned from the text) or a tokenizer file ({data.DEFAULT_TOKENIZER})",
    )
    p.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read and encode (all cores, if there is enough text)",
    )
    p.add_argument("--text-key", default="text", metavar="KEY", help="key or column of the text (text)")
    p.add_argument("--val-fraction", type=float, default=0.1, metavar="F", help="share held out (0.1)")
    p.add_argument(
        "--layout",
        default=OWN,
        metavar="L",
        help=f"layout of the token files: {layouts} ({OWN}, the only one with a manifest)",
    )
    p.add_argument(
        "--name",
        metavar="NAME",
        help="llmc: prefix of the file names (text); megatron: one .bin and .idx with all documents, "
        "held-out ones last, such as wikipedia_text_document (without it, a pair for each part)",
    )
    p.add_argument("--dedup", action="store_true", help="leave out repeated documents")
    p.add_argument(
        "--tolerant",
        type=float,
        nargs="?",
        const=0.01,
        metavar="SHARE",
        help="skip up to this share of records that are not text (0.01); without it, the first is an error",
    )


def _sample(p: KeyParser) -> None:
    _model(p)
    p.add_argument("--prompt", required=True, help="the beginning of the text")
    p.add_argument("--tokens", type=int, default=200, help="number of tokens to generate (200)")
    p.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    p.add_argument("--top-k", type=int, default=40, help="sample from the N most likely tokens (40)")
    p.add_argument("--top-p", type=float, default=1.0, help="sample from the top tokens of this share (1)")
    p.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    p.add_argument(
        "--cache",
        choices=("auto", "on", "off"),
        default="auto",
        help="cache keys and values; auto: if the recipe scales each token separately",
    )


def _eval(p: KeyParser) -> None:
    _model(p)
    p.add_argument("--task", default="val", help=f"{' | '.join(TASKS)} (val: held-out text)")
    p.add_argument("--data", metavar="SOURCE", help="val: text, if not the run's")
    p.add_argument("--batches", type=int, help="val: number of batches (all)")
    p.add_argument("--sequence-length", type=int, help="val: tokens per sequence (the run's)")
    p.add_argument("--forward", metavar="R", help="val: also evaluate with this recipe's forward pass")
    p.add_argument("--limit", type=int, help="other tasks: number of examples (all)")
    p.add_argument("--task-folder", type=Path, help="lm-eval: folder with YAML files of more tasks")


def _export(p: KeyParser) -> None:
    p.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    p.add_argument("--to", required=True, metavar="FORMAT", help=" | ".join(EXPORT_FORMATS))
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    p.add_argument("--dtype", help="fp32, bf16 or fp16 (fp32; bf16 for quantized weights)")
    text = f"store activation scales: measured on a text, or '{RECORDED}' by delayed scaling"
    p.add_argument("--calibrate", metavar="SOURCE", help=text)


def _import(p: KeyParser) -> None:
    p.add_argument(
        "path", metavar="PATH", type=Path, help="a Hugging Face folder, or a file of llm.c or GGUF"
    )
    p.add_argument("--out", required=True, type=Path, metavar="RUN", help="a new run directory")
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json (the model's)")
    p.add_argument("--data", metavar="SOURCE", default="stdlib", help="text to evaluate it on (stdlib)")


def _served(p: KeyParser) -> None:
    p.add_argument("run", metavar="RUN", type=Path, help="a run, a Hugging Face folder or an llm.c model")
    p.add_argument("--with", dest="server", required=True, metavar="SERVER", help=" | ".join(SERVERS))
    first = "; ".join(f"{server}: {' | '.join(formats)}" for server, formats in SERVERS.items())
    p.add_argument("--to", metavar="FORMAT", help=f"what the server reads ({first}; the first)")
    p.add_argument("--files", type=Path, metavar="DIR", help="serve this export of the run (a new one)")
    p.add_argument("--data", metavar="SOURCE", help="text, if not the run's")
    p.add_argument("--sequences", type=int, default=16, help="number of held-out sequences (16)")
    p.add_argument("--sequence-length", type=int, help="tokens per sequence (the run's)")
    p.add_argument(
        "--margin", type=float, default=0.01, help="largest difference of the loss that is equal (0.01)"
    )
    p.add_argument("--page", type=Path, metavar="FILE", help="also write the result as a page (HTML)")
    p.add_argument("--json", action="store_true", help="print JSON")


def _model(p: KeyParser) -> None:
    p.add_argument("run", metavar="RUN", type=Path, help="a run, a Hugging Face folder or an llm.c model")
    p.add_argument("--tokenizer", type=Path, help="a tokenizer.json (the model's)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")


def _probe(p: KeyParser) -> None:
    _subject(p, batches=8)
    p.add_argument("--recipes", metavar="A,B,...", help="shipped recipes or .toml files (the run's)")
    p.add_argument(
        "--draws", type=positive_integer, default=8, metavar="N", help="draws of random bits per batch (8)"
    )


def _sensitivity(p: KeyParser) -> None:
    _subject(p, batches=4)
    p.add_argument("--to", required=True, metavar="CAST", help="the low-precision cast to try, such as mxfp4")
    p.add_argument(
        "--exact", action="store_true", help="also measure backward places, each with separate passes"
    )
    _forks(p)


def _forks(p: KeyParser) -> None:
    text = "measure by training N steps from the checkpoint, with and without a narrow place"
    p.add_argument("--fork-steps", type=positive_integer, metavar="N", help=text)
    text = "repeats of each fork, in another order of the text (3)"
    p.add_argument("--fork-seeds", type=positive_integer, default=3, metavar="N", help=text)


def _search(p: KeyParser) -> None:
    _subject(p, batches=4)
    p.add_argument("--formats", required=True, metavar="A,B,C", help="casts to choose from: mxfp4,mxfp8,bf16")
    text = "minimum share of the FLOPs in 4 bits"
    p.add_argument("--budget", type=float, required=True, metavar="X", help=text)
    text = "nats that twice the steps would remove from the loss (the run's)"
    p.add_argument("--loss-per-doubling", type=float, metavar="NATS", help=text)
    text = f"layers that stay in the widest format, '' for none ({HEAD})"
    p.add_argument("--keep", default=HEAD, metavar="A,B", help=text)
    p.add_argument("--out", required=True, type=Path, metavar="R.toml", help="the recipe's file")
    _forks(p)
    p.add_argument("--check", action="store_true", help="train it along with bf16 and four baselines")
    p.add_argument("--seeds", default="3", metavar="N|A,B,C", help="with --check: seeds per recipe (3)")
    p.add_argument("--steps", metavar="N", help="with --check: optimizer steps (the run's)")


def _subject(p: KeyParser, batches: int) -> None:
    p.add_argument("run", metavar="RUN", type=Path, help="a run, a Hugging Face folder or an llm.c model")
    p.add_argument("--data", metavar="SOURCE", help="text, if not the run's")
    text = f"batches of held-out text ({batches})"
    p.add_argument("--batches", type=positive_integer, default=batches, metavar="N", help=text)
    p.add_argument("--batch-size", type=positive_integer, metavar="N", help="sequences per batch (the run's)")
    p.add_argument("--sequence-length", type=positive_integer, metavar="N", help="tokens (the run's)")
    p.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (the model's)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _advise(p: KeyParser) -> None:
    text = "a named model (narrowgauge models)"
    p.add_argument("--model", required=True, type=checked(_named_model), metavar="NAME", help=text)
    _cluster_option(p, f"{', '.join(cluster.cluster_names())}, or a .toml file (this machine)")
    p.add_argument("--devices", type=positive_integer, default=1, metavar="N", help="number of devices (1)")
    p.add_argument("--tokens", metavar="D", help="training tokens, as in 10B (as published)")
    p.add_argument("--hours", type=float, metavar="H", help="limit on the hours of the training")
    p.add_argument("--money", type=float, metavar="M", help="limit on its cost, in the currency of the price")
    p.add_argument("--price", metavar="P", help="price of a device-hour, as in 2.50USD (the cluster's)")
    p.add_argument("--recipes", metavar="A,B,C", help="recipes to choose from (those native on the device)")
    p.add_argument("--sequence-length", type=positive_integer, metavar="N", help="tokens (as published)")
    p.add_argument(
        "--batch-size", type=positive_integer, metavar="N", help="sequences per step (as published)"
    )
    p.add_argument("--data", metavar="SOURCE", help="data source for the printed commands")
    p.add_argument("--json", action="store_true", help="print JSON")


def _predict(p: KeyParser) -> None:
    p.add_argument(
        "--recipe", required=True, metavar="R,...", help="recipes, schemes of the atlas, .toml files"
    )
    size = p.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", metavar="N", help="parameters without embeddings, as in 1.9B")
    size.add_argument(
        "--model", metavar="NAME", help="a named model in place of --params (narrowgauge models)"
    )
    p.add_argument("--tokens", required=True, metavar="D", help="training tokens, as in 38e9 or 38B")
    text = "your own: a folder of compare, or run directories with the reference first"
    p.add_argument("--runs", action="extend", type=Path, nargs="+", metavar="DIR", help=text)
    text = "what probe --json printed, of the recipe and of one with points, such as nvfp4"
    p.add_argument("--probe", type=Path, metavar="FILE", help=text)
    p.add_argument(
        "--atlas", type=Path, metavar="FILE", help="other points than those that ship (docs/atlas.md)"
    )
    p.add_argument("--explain", action="store_true", help="the points behind it, and what published laws say")
    p.add_argument("--out", type=Path, metavar="FILE", help="write a picture (.svg), .json, .csv or .txt")
    p.add_argument("--json", action="store_true", help="print JSON")


def _launch(p: KeyParser) -> None:
    kind = p.add_mutually_exclusive_group()
    kind.add_argument("--slurm", action="store_true", help="for sbatch: srun starts one process per device")
    kind.add_argument("--torchrun", action="store_true", help="to run on each node, without a scheduler")
    p.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (1)")
    p.add_argument("--gpus-per-node", type=int, metavar="G", help="processes per node (the site's, or 1)")
    p.add_argument("--site", metavar="NAME", help=f"{', '.join(cluster.site_names())} or a .toml file")
    p.add_argument(
        "--time", default="", metavar="HH:MM:SS", help="Slurm: time limit, or D-HH:MM:SS (the site's)"
    )
    p.add_argument("--account", default="", metavar="A", help="Slurm: account (the site's)")
    p.add_argument("--partition", default="", metavar="P", help="Slurm: partition (the site's)")
    p.add_argument("--out", type=Path, metavar="SCRIPT", help="the script")
    p.add_argument("words", nargs=argparse.REMAINDER, metavar="-- train ...", help="the command to start")


def _report(p: KeyParser) -> None:
    p.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, the reference first")
    p.add_argument("--out", type=Path, help="the page (report.html in the first RUN)")
    p.add_argument("--expected", action="store_true", help="compare each gap with its forecast")


def _watch(p: KeyParser) -> None:
    text = "a run, a folder of compare, a folder of runs, or several runs, the reference first"
    p.add_argument("paths", metavar="PATH", type=Path, nargs="+", help=text)
    p.add_argument("--out", type=Path, metavar="FILE", help="the page (live.html in the first PATH)")
    p.add_argument("--once", action="store_true", help="write the page as it is now, and end")


def _recipes(p: KeyParser) -> None:
    p.add_argument("name", metavar="NAME", nargs="?", help="a shipped recipe or a .toml file")
    p.add_argument(
        "--device",
        metavar="D",
        help="show what is native on another device: sm_89, gfx942, rtx4090, mi250x, cpu ...; "
        "with NAME, place by place",
    )
    p.add_argument("--diff", metavar="OTHER", help="with NAME: show the differences from another recipe")
    p.add_argument("--to", metavar="|".join(TARGETS), help="with NAME: write the recipe for another tool")
    p.add_argument(
        "--from",
        dest="source",
        metavar="|".join(SOURCES),
        help="NAME is a file of that tool: print its recipe, or pass it on to --to or --diff",
    )
    p.add_argument("--blocks", metavar="N", type=int, help="megatron: number of blocks of the model")


def _name(p: KeyParser) -> None:
    """Add the option that these verbs share."""
    p.add_argument("name", metavar="NAME", nargs="?", help="the one to describe (list all)")


def _runs(p: KeyParser) -> None:
    p.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=FOLDER, help=f"where ({FOLDER})")
    p.add_argument("--json", action="store_true", help="print a JSON list; a missing loss is null")


OPTIONS: Mapping[str, Callable[[KeyParser], None]] = {
    "train": _train,
    "compare": _compare,
    "plan": _plan,
    "bench": _bench,
    "doctor": add_doctor_options,
    "scaling": _scaling,
    "prepare": _prepare,
    "sample": _sample,
    "eval": _eval,
    "export": _export,
    "import": _import,
    "served": _served,
    "probe": _probe,
    "sensitivity": _sensitivity,
    "search": _search,
    "predict": _predict,
    "advise": _advise,
    "launch": _launch,
    "report": _report,
    "watch": _watch,
    "recipes": _recipes,
    "formats": _name,
    "models": _name,
    "runs": _runs,
}
#: The verbs whose command line takes keys of the configuration, after their own options.
WITH_KEYS = ("train", "compare", "plan", "bench", "scaling")


def add_options(verb: str, p: KeyParser) -> None:
    """Add the options of a verb to its parser."""
    OPTIONS[verb](p)
    p.mark_required()
    p.verbs_with = verbs_with
    if verb in WITH_KEYS:
        add_config_options(p)


def verbs_with(option: str) -> list[str]:
    """The verbs that have an option of this name, else those with a key that it may mean; as in the help."""
    verbs = parsers().items()
    return [verb for verb, parser in verbs if parser.has(option)] or [
        verb for verb, parser in verbs if parser.has_key(option)
    ]


def parsers() -> Mapping[str, KeyParser]:
    """The parsers of all verbs with their options, by name, in the order of the help."""
    _, verbs = command_parser(KeyParser)
    for name, parser in verbs.items():
        add_options(name, parser)
    return {name: verbs[name] for names in grouped().values() for name in names}

"""What the command line writes besides digits: prepared text, files of checkpoints and exports, plans, words.

Each output is a tree of strings and numbers. Where a part of it follows from digits, that part is apart from
the rest (`form=... digits=...`, or the key `digits`), and `form` leaves it out: so it is compared where the
arithmetic is another one.
"""

import bz2
import json
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import narrowgauge as ng
from golden.cells import LIKE_GPT2, run_of
from golden.runs import Worker, checkpoint_of, lines_of, sha
from narrowgauge.trainer.runs import branch_run
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.runs.use.branch import with_recipe

Tree = Any

ARTICLE = """{{Infobox|name=Iron|image=[[File:Fe.jpg|thumb|An [[ingot]]]]}}
'''Iron''' ({{lang|la|ferrum}}) is a [[metal]]&nbsp;of [[group 8 element|group 8]].<ref>A [[book]].</ref>
== Uses ==
Tools &ndash; and [http://example.org nails].
{| class="wikitable"
| 1900 || 40
|}
* H<sub>2</sub>O is not in it
[[Category:Metals]]
"""
# whose checkpoints, exports and pages are kept
MSAMP, NVFP4 = "msamp-o3, 2 micro-batches", "nvfp4, 2 micro-batches"


def write_sources(directory: Path) -> dict[str, str]:
    """Sources of each kind, in addition to the text of `runs`."""
    records = [{"text": f"{'narrow gauge ' * (i % 7 + 1)}{i % 31}"} for i in range(60)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "records.jsonl").write_text(lines)
    revision = '<id>2</id><model>wikitext</model><text xml:space="preserve">{}</text>'
    page = f"<page><title>Iron {{}}</title><ns>{{}}</ns><id>1</id><revision>{revision}</revision></page>\n"
    pages = [page.format(i, i % 5 // 4, escape(f"{ARTICLE}{i}")) for i in range(20)]
    head = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n'
    dump = f"{head}{''.join(pages)}</mediawiki>\n"
    (directory / "dump.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    return {"text": "text", "records": "records.jsonl", "dump": "dump.xml.bz2"}


def commands(worker: Worker, *lines: Sequence[str | Path]) -> list[str]:
    """What each of some command lines prints, in one process; they must succeed."""
    ended = worker(*({"argv": list(map(str, line))} for line in lines))
    for line, end in zip(lines, ended, strict=True):
        assert end["code"] == 0, (line, end["err"])
    return [str(end["out"]) for end in ended]


def files_of(directory: Path, of_file: Callable[[Path], str]) -> dict[str, str]:
    """Each file of a directory, with its digest."""
    return {
        str(path.relative_to(directory)): of_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def exact(path: Path) -> str:
    """The digest of a file."""
    return sha(path.read_bytes())


def in_parts(path: Path) -> str:
    """The digest of a file; where some of it follows from digits, in two parts."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(data[:8], "little")
        return f"form={sha(data[:start])} digits={sha(data[start:])}"
    if path.name == "model.bin":  # llm.c's: 256 whole numbers, then the weights
        return f"form={sha(data[:1024])} digits={sha(data[1024:])}"
    if path.name in ("manifest.json", "state.json"):  # digests of the others; losses
        return f"form={sha(json.dumps(shape_of(json.loads(data))).encode())} digits={sha(data)}"
    return sha(data)


def shape_of(tree: Tree) -> Tree:
    """The keys of a tree, without what stands there."""
    if isinstance(tree, dict):
        return {key: shape_of(value) for key, value in tree.items()}
    return [shape_of(value) for value in tree] if isinstance(tree, list) else type(tree).__name__


def prepared(worker: Worker) -> Tree:
    """Every file that `prepare` makes of each kind of source, and in each layout."""
    sources = write_sources(worker.directory)
    how = {
        "text": ("text", "--tokenizer", "bytes"),
        "text, bpe": ("text", "--tokenizer", "bpe-300"),
        "records": ("records", "--tokenizer", "bytes", "--dedup", "--val-fraction", "0.25"),
        "dump": ("dump", "--tokenizer", "bytes"),
        "text as llmc": ("text", "--tokenizer", "bytes", "--layout", "llmc"),
        "text as megatron": ("text", "--tokenizer", "bytes", "--layout", "megatron"),
    }
    outs = {name: f"prepared-{name.replace(' ', '-')}" for name in how}
    lines = [
        ("prepare", sources[source], "--out", outs[name], "--workers", "1", *options)
        for name, (source, *options) in how.items()
    ]
    commands(worker, *lines)
    return {name: files_of(worker.directory / out, exact) for name, out in outs.items()}


def checkpoints(worker: Worker) -> Tree:
    """Every file of the last checkpoint of some runs, and of a run that was converted."""
    saved = {name: checkpoint_of(run_of(worker, name)) for name in (MSAMP, "fp8, shard 2")}
    config = with_recipe(RunDirectory(run_of(worker, MSAMP)).config(), "nvfp4")
    longer = config.training.model_copy(update={"steps": config.training.steps + 1})
    config = config.model_copy(update={"training": longer})
    branch_run(run_of(worker, MSAMP), None, config, worker.directory / "converted")
    saved["msamp-o3 converted to nvfp4"] = checkpoint_of(worker.directory / "converted")
    return {name: files_of(checkpoint, in_parts) for name, checkpoint in saved.items()}


def exports(worker: Worker) -> Tree:
    """Every file of every export, and of an import."""
    gpt2 = worker.train("like gpt2", worker.values("bf16", LIKE_GPT2 | {"training.steps": 1}))
    runs = {"llama": run_of(worker, MSAMP), "narrow-llama": run_of(worker, NVFP4), "gpt2": gpt2}
    made = {
        "llama-as-hf": ("llama", "hf"),
        "narrow-llama-as-compressed-tensors": ("narrow-llama", "compressed-tensors"),
        "gpt2-as-hf": ("gpt2", "hf"),
        "gpt2-as-llmc": ("gpt2", "llmc"),
    }
    lines = [("export", runs[run], "--to", to, "--out", out) for out, (run, to) in made.items()]
    back = ("import", "gpt2-as-llmc/model.bin", "--out", "gpt2-from-llmc", "--data", "text")
    commands(worker, *lines, back)
    return {out: files_of(worker.directory / out, in_parts) for out in (*made, "gpt2-from-llmc")}


def plans(worker: Worker) -> Tree:
    """The plans of four configurations, as programs read them; few layers, which are gone through quickly."""
    small = "--model gpt2-124m --model.layers 2 --training.micro_batch_size 1"
    asked = {
        "fp8, one device": f"{small} --recipe fp8 --memory-limit 24GB",
        "msamp-o3, in part offloaded": f"{small} --recipe msamp-o3 --recipe.offload m,v --cluster rtx4090",
        "bf16, cut four ways": (
            f"{small} --recipe bf16 --cluster frontier --devices 512 --tokens 1T --training.batch_size 512 "
            "--parallel.tensor 2 --parallel.context 2 --parallel.pipeline 2"
        ),
        "nvfp4, copies of shards": (
            "gpt3-13b --model.layers 2 --training.recompute true --recipe nvfp4 "
            "--cluster h100 --devices 64 --parallel.replicate 4 --tokens 1B --price 2"
        ),
    }
    told = commands(worker, *(("plan", *line.split(), "--json") for line in asked.values()))
    found: dict[str, Tree] = {name: json.loads(text) for name, text in zip(asked, told, strict=True)}
    for plan in found.values():
        # Time is counted, and moves with each kernel: tests/gpu_budget and tests/cluster/plan hold it.
        for counted in ("step", "run", "expect"):
            plan.pop(counted, None)
    return found


def words(worker: Worker) -> Tree:
    """The names of the package, and the commands, options and keys of the command line, without sentences."""
    (top,) = commands(worker, ("--help",))
    verbs = re.findall(r"^    ([a-z]+)\b", top, re.MULTILINE)
    lines = [*((verb, "--help") for verb in verbs), ("train", "--help", "all"), ("formats",)]
    texts = {" ".join(line): text for line, text in zip(lines, commands(worker, *lines), strict=True)}
    keys = re.findall(r"^keys of the .*?\n\n", texts["train --help"], re.MULTILINE | re.DOTALL)[0]
    limits = texts.pop("formats").splitlines()
    return {
        "names of the package": sorted(ng.__all__),
        "formats": ng.format_names(),
        "recipes": {name: sha(ng.recipe(name).text.encode()) for name in ng.recipe_names()},
        "keys": re.sub(r",\s+", ", ", keys).strip().split("\n")[1:],
        "limits of formats": limits,
        "narrowgauge": {
            line: shape_of_help(text.replace(keys, "")) for line, text in ({"--help": top} | texts).items()
        },
    }


def shape_of_help(text: str) -> list[str]:
    """The usage and the left column of a help text: commands and options with what they take.

    >>> shape_of_help("usage: x [A]\\n\\nTrain.\\n\\noptions:\\n  -h N, --help N  show this\\n")
    ['usage: x [A]', '-h, --help N']
    """
    usage = re.findall(r"\Ausage: .*?(?=\n\n)", text, re.DOTALL)
    rest = text.removeprefix("".join(usage)).partition("\nexamples:")[0]
    rows = re.findall(r"^ {2,4}(\S+(?: \S+)*)(?= {2,}|$)", rest, re.MULTILINE)
    # Python 3.13 writes what an option takes once, behind its last name.
    rows = [re.sub(r"^(-\w) \S+(?=, --)", r"\1", row) for row in rows]
    return [" ".join(line.split()) for line in usage] + rows


def report(worker: Worker) -> Tree:
    """What the page of two runs gives its script, and a digest of each section's text; times are made up."""
    runs = [run_of(worker, name) for name in (MSAMP, NVFP4)]
    for run in runs:
        _make_times_up(run / "metrics.jsonl")
    commands(worker, ("report", *runs, "--out", "report.html"))
    page = (worker.directory / "report.html").read_text(encoding="ascii")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    body = page.partition("<body>")[2].partition("<script")[0]
    texts = {}
    for section in body.split("<section")[1:]:
        title = re.findall("<h2>(.*?)</h2>", section)[0]
        texts[title] = sha(" ".join(unescape(re.sub(r"<[^>]*>", " ", section)).split()).encode())
    return {"digits": {"data": _short(json.loads(data)), "texts": texts}}


def _short(tree: Tree) -> Tree:
    """The tree with a line for a list of numbers, and a digest where numbers go by the hundred."""
    if isinstance(tree, dict):
        return {key: _short(value) for key, value in tree.items()}
    if not isinstance(tree, list):
        return tree
    text = json.dumps(tree)
    is_flat = not any(isinstance(value, dict | list) for value in tree)
    if len(text) < 100 and is_flat:
        return text
    if is_flat or isinstance(tree[0], list):
        return sha(text.encode())
    return [_short(value) if len(tree) < 9 else sha(json.dumps(value).encode()) for value in tree]


# What differs from one run of a test to the next, or between machines: the only place that makes it equal.
MADE_UP = {
    **{"tokens_per_s": 1000.0, "step_ms": 500.0, "mfu": 0.25, "memory_bytes": 10**9, "torch": "2"},
    **{"time": "2026-11-22T07:30:00+00:00", "host": "here", "version": "0", "command": "train"},
}


def _make_times_up(metrics: Path) -> None:
    lines = [line | {key: x for key, x in MADE_UP.items() if key in line} for line in lines_of(metrics)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


OUTPUTS: dict[str, Callable[[Worker], Tree]] = {
    "prepared": prepared,
    "checkpoints": checkpoints,
    "exports": exports,
    "plans": plans,
    "words": words,
    "report": report,
}


def form(tree: Tree) -> Tree:
    """The tree without what follows from digits: only its shape."""
    if isinstance(tree, dict):
        return {k: shape_of(v) if k == "digits" else form(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [form(value) for value in tree]
    return tree.partition(" digits=")[0] if isinstance(tree, str) else tree


def differences(kept: Tree, now: Tree) -> list[str]:
    """What differs between two trees, in sentences, from the top."""
    a, b = dict(_leaves(kept)), dict(_leaves(now))
    return [f"{at}: {a.get(at)!r} was kept, {b.get(at)!r} is now" for at in a | b if a.get(at) != b.get(at)]


def _leaves(tree: Tree, where: str = "") -> Iterator[tuple[str, Tree]]:
    """The place and the value of each leaf of a tree."""
    if not isinstance(tree, dict | list):
        yield where, tree
        return
    for key, inside in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(inside, f"{where} > {key}")

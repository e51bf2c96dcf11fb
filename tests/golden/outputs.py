"""What the command line writes besides digits: prepared text, files of checkpoints and exports.

Each output is a tree of digests. Where a part of a file follows from digits, its digest is apart from that of
the rest (`form=... digits=...`), and `form` leaves it out: so it is compared where the arithmetic is another
one.
"""

import bz2
import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from golden.cells import LIKE_GPT2, run_of
from golden.runs import Worker, checkpoint_of, sha
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
# whose checkpoints and exports are kept
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


OUTPUTS: dict[str, Callable[[Worker], Tree]] = {
    "prepared": prepared,
    "checkpoints": checkpoints,
    "exports": exports,
}


def form(tree: Tree) -> Tree:
    """The tree without what follows from digits."""
    if isinstance(tree, dict):
        return {key: form(value) for key, value in tree.items()}
    return tree.partition(" digits=")[0] if isinstance(tree, str) else tree


def differences(kept: Tree, now: Tree) -> list[str]:
    """What differs between two trees, in sentences, from the top."""
    a, b = dict(leaves(kept)), dict(leaves(now))
    return [f"{at}: {a.get(at)!r} was kept, {b.get(at)!r} is now" for at in a | b if a.get(at) != b.get(at)]


def leaves(tree: Tree, where: str = "") -> Iterator[tuple[str, str]]:
    """The place and the value of each leaf of a tree."""
    if not isinstance(tree, dict | list):
        yield where, tree
        return
    for key, inside in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(inside, f"{where} > {key}")

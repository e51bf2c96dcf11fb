"""The verb `doctor`: collects the facts of this machine, judges them and prints each fix.

It only reads, apart from one temporary file on each disk. Each topic has a file that reads its facts off the
machine (`read_*`) and has its checks, from the facts to a verdict.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_directory, user_path
from narrowgauge.trainer.cluster.doctor import gpus, host, network, software
from narrowgauge.trainer.cluster.doctor.facts import Facts, Given, Verdict
from narrowgauge.trainer.cluster.doctor.torch_setup import ask_torch

_STYLES = {"OK": "green", "WARN": "yellow", "MISS": "bold red"}

#: The check of each item, in the order in which to fix them; None: there is nothing to judge.
CHECKS: dict[str, Callable[[Facts], Verdict | None]] = {
    "system": software.system,
    "python": software.python,
    "packages": software.packages,
    "torch": software.torch,
    "driver": software.driver,
    "gpus": gpus.gpus,
    "recipes": gpus.recipes,
    "nccl": gpus.nccl,
    "peers": gpus.peers,
    "gpu-jobs": gpus.jobs,
    "launcher": host.launcher,
    "ranks": host.ranks,
    "cores": host.cores,
    "open-files": host.open_files,
    "locked-memory": host.locked_memory,
    "shared-memory": host.shared_memory,
    "clock": host.clock,
    "disk": lambda facts: host.disk(facts.disk, "go to another folder, or name one with --out"),
    "cache": lambda facts: host.disk(facts.cache, "name another folder in NARROWGAUGE_CACHE"),
    "compiler": host.compiler,
    "data": lambda facts: host.given("data", facts.data),
    "tokenizer": lambda facts: host.given("tokenizer", facts.tokenizer),
    "network": network.network,
}


def read_facts(data: str | None = None, tokenizer: str | None = None) -> Facts:
    """The facts of this machine, and of the given data and tokenizer."""
    of_torch = ask_torch()
    facts = Facts(
        **software.read_software(of_torch) | gpus.read_gpus(of_torch),
        **host.read_system() | host.read_compilers(),
        environment=dict(os.environ),
        disk=host.read_disk(Path.cwd()),
        cache=host.read_disk(cache_directory()),
        hub=network.ask_hub(),
    )
    return replace(facts, data=_given(facts, "data", data), tokenizer=_given(facts, "tokenizer", tokenizer))


def _given(facts: Facts, what: str, name: str | None) -> Given | None:
    """The facts of data or a tokenizer, found by the code that `train` uses, which needs torch."""
    if name is None:
        return None
    if not facts.torch_works:
        return Given(name, error=f"{name}: not looked at; fix torch and the packages first (see above)")
    try:
        return Given(name, found=_data(name) if what == "data" else _tokenizer(name))
    except (UserError, OSError) as error:
        return Given(name, error=str(error))


def _data(name: str) -> str:
    """The kinds of the sources; nothing is prepared."""
    from narrowgauge.trainer.data import is_corpus, open_corpus, split_sources
    from narrowgauge.trainer.data.sources import open_source
    from narrowgauge.trainer.data.sources.tables import HUB
    from narrowgauge.trainer.data.token_files.source import token_files

    def kind(source: str) -> str:
        if source.startswith(HUB):
            return "a data set of the Hugging Face hub"
        if is_corpus(folder := user_path(source)):
            tokens = open_corpus(folder).manifest.train_tokens
            return f"a prepared corpus, whole: {tokens:,} tokens to train on"
        if files := token_files(source):
            train, val = files
            return f"token files: {len(train)} to train on, {len(val) or 'the tail of them'} held out"
        return f"text: {len(open_source(source).inputs):,} files"

    return "; ".join(map(kind, split_sources(name)))


def _tokenizer(name: str) -> str:
    """The size of the tokenizer."""
    from narrowgauge.trainer.data import load_tokenizer
    from narrowgauge.trainer.data.tokenization.tokenizer import tokenizer_identity

    if tokenizer_identity(name) == name:
        return "needs no file"
    return f"{load_tokenizer(user_path(name)).vocab_size:,} tokens"


def check(facts: Facts) -> dict[str, Verdict]:
    """The verdicts on a machine by item, derived from the facts alone."""
    return {item: verdict for item, judge in CHECKS.items() if (verdict := judge(facts))}


def examine(data: str | None = None, tokenizer: str | None = None) -> dict[str, Verdict]:
    """The verdicts by item on this machine and on the given data and tokenizer."""
    return check(read_facts(data, tokenizer))


def as_json(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as a list of {item, status, found, fix}."""
    rows = [{"item": item, **verdict._asdict()} for item, verdict in verdicts.items()]
    return json.dumps(rows, indent=1, ensure_ascii=False)


def print_items(verdicts: Mapping[str, Verdict], console: Console) -> None:
    """Print the verdicts as a table, each fix under what was found, and a line that counts them."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for item, (status, found, fix) in verdicts.items():
        table.add_row(f"[{_STYLES[status]}]{status}[/]", item, escape(found))
        if fix:
            table.add_row("", "", escape(f"fix: {fix}"))
    console.print(table, highlight=False)
    said = [verdict.status for verdict in verdicts.values()]
    console.print(", ".join(f"{said.count(status)} {status}" for status in _STYLES), highlight=False)

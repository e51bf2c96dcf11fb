"""The verb `doctor`: judges the facts of this machine, and prints each fix.

`read.py` reads the facts. Each other file has checks, from the facts to a verdict.
"""

import json
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowgauge.trainer.cluster.doctor import fit, host, network
from narrowgauge.trainer.cluster.doctor.facts import Facts, Verdict
from narrowgauge.trainer.cluster.doctor.read import read_facts

_STYLES = {"OK": "green", "WARN": "yellow", "MISS": "bold red"}

#: The check of each item, in the order in which to fix them; None: there is nothing to judge.
CHECKS: dict[str, Callable[[Facts], Verdict | None]] = {
    "system": fit.system,
    "python": fit.python,
    "packages": fit.packages,
    "torch": fit.torch,
    "driver": fit.driver,
    "gpus": fit.gpus,
    "recipes": fit.recipes,
    "nccl": fit.nccl,
    "peers": fit.peers,
    "gpu-jobs": fit.jobs,
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
    "data": lambda facts: facts.data,
    "tokenizer": lambda facts: facts.tokenizer,
    "network": network.network,
}


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

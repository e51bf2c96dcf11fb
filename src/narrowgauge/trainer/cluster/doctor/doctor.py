"""The verb `doctor`: collects the facts of this machine, judges them and prints each fix.

It only reads, apart from one temporary file on each disk. Each topic has a file that reads its facts off the
machine (`collect_*`) and judges them (`check_*`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowgauge.system.files import cache_directory
from narrowgauge.trainer.cluster.doctor.facts import Facts, Given, Verdict
from narrowgauge.trainer.cluster.doctor.gpus import check_gpus, collect_hardware
from narrowgauge.trainer.cluster.doctor.host import check_host, collect_compiler, collect_disk, collect_system
from narrowgauge.trainer.cluster.doctor.launch import check_launch
from narrowgauge.trainer.cluster.doctor.network import ask_hub, check_network
from narrowgauge.trainer.cluster.doctor.software import check_software, collect_software
from narrowgauge.trainer.cluster.doctor.torch_setup.ask_torch import ask_torch

_STYLES = {"OK": "green", "WARN": "yellow", "MISS": "bold red"}


def collect(data: str | None = None, tokenizer: str | None = None) -> Facts:
    """The facts of this machine, and of the given data and tokenizer."""
    torch = ask_torch()
    software = collect_software(torch)
    return Facts(
        software=software,
        hardware=collect_hardware(torch),
        system=collect_system(),
        environment=dict(os.environ),
        disk=collect_disk(Path.cwd()),
        cache=collect_disk(cache_directory()),
        hub=ask_hub(),
        data=_given("data", data, software.works),
        tokenizer=_given("tokenizer", tokenizer, software.works),
        compiler=collect_compiler(),
    )


def _given(what: str, name: str | None, torch_works: bool) -> Given | None:
    """The facts of data or a tokenizer, found by the code that `train` uses, which needs torch."""
    if name is None:
        return None
    if not torch_works:
        return Given(name=name, error=f"{name}: not looked at; fix torch and the packages first (see above)")
    from narrowgauge.trainer.cluster.doctor.given import collect_data, collect_tokenizer

    return collect_data(name) if what == "data" else collect_tokenizer(name)


def check(facts: Facts) -> dict[str, Verdict]:
    """The verdicts on a machine by item, derived from the facts alone."""
    judges = (check_software, check_gpus, check_launch, check_host, check_network)
    return {item: verdict for judge_some in judges for item, verdict in judge_some(facts).items()}


def examine(data: str | None = None, tokenizer: str | None = None) -> dict[str, Verdict]:
    """The verdicts by item on this machine and on the given data and tokenizer."""
    return check(collect(data, tokenizer))


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

"""What is wrong with this machine, and how is it fixed? The facts, judged and printed."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from narrowgauge.cluster.doctor.check_gpus import check_gpus
from narrowgauge.cluster.doctor.check_host import check_host
from narrowgauge.cluster.doctor.check_launch import check_launch
from narrowgauge.cluster.doctor.check_network import check_network
from narrowgauge.cluster.doctor.check_software import check_software
from narrowgauge.cluster.doctor.collect import collect
from narrowgauge.cluster.doctor.facts import Facts, Item

_STYLES = {"OK": "green", "WARN": "yellow", "MISS": "bold red"}


def check(facts: Facts) -> list[Item]:
    """The verdicts on a machine; they follow from the facts alone."""
    judges = (check_software, check_gpus, check_launch, check_host, check_network)
    return [item for judge_some in judges for item in judge_some(facts)]


def examine(data: str | None = None, tokenizer: str | None = None) -> list[Item]:
    """The verdicts on this machine, and on the data and the tokenizer of these names."""
    return check(collect(data, tokenizer))


def as_json(items: Sequence[Item]) -> str:
    """The verdicts as a list of {item, status, found, fix}."""
    return json.dumps([asdict(item) for item in items], indent=1, ensure_ascii=False)


def print_items(items: Sequence[Item], console: Console) -> None:
    """The verdicts as a table, each fix under what was found, and a line that counts them."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for item in items:
        table.add_row(f"[{_STYLES[item.status]}]{item.status}[/]", item.item, _plain(item.found))
        if item.fix:
            table.add_row("", "", _plain(f"fix: {item.fix}"))
    console.print(table, highlight=False)
    count = {status: sum(item.status == status for item in items) for status in _STYLES}
    console.print(", ".join(f"{number} {status}" for status, number in count.items()), highlight=False)


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return text.replace("[", r"\[")

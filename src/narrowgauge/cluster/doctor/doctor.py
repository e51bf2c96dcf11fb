"""The verb `doctor`: it judges the facts of this machine, and prints what is wrong and how to fix it."""

import json
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowgauge.cluster.doctor.check_gpus import check_gpus
from narrowgauge.cluster.doctor.check_host import check_host
from narrowgauge.cluster.doctor.check_launch import check_launch
from narrowgauge.cluster.doctor.check_network import check_network
from narrowgauge.cluster.doctor.check_software import check_software
from narrowgauge.cluster.doctor.collect import collect
from narrowgauge.cluster.doctor.facts import Facts, Verdict

_STYLES = {"OK": "green", "WARN": "yellow", "MISS": "bold red"}


def check(facts: Facts) -> dict[str, Verdict]:
    """The verdicts on a machine, by item; they follow from the facts alone."""
    judges = (check_software, check_gpus, check_launch, check_host, check_network)
    return {item: verdict for judge_some in judges for item, verdict in judge_some(facts).items()}


def examine(data: str | None = None, tokenizer: str | None = None) -> dict[str, Verdict]:
    """The verdicts on this machine by item, and on the data and the tokenizer of these names."""
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

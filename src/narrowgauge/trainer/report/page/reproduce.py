"""A shell script that trains the runs of a page again: versions, configurations, recipes, commands.

It needs a POSIX shell, and nothing of the run directories. A recipe that is not shipped is written next to
its configuration. Data that is a path of the machine is named, since only its owner can supply it.
"""

import shlex
from collections.abc import Mapping, Sequence

from narrowgauge.recipes import recipe_names
from narrowgauge.system.toml_text import toml_tables
from narrowgauge.trainer.report.read.records import MOST_TEXT
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.runs.choices import PRODUCTS, RAISED

FOLDER = "reproduced"  # where the script writes
MOST = 64  # runs whose configurations a page holds
_NOT_FROM_SCRATCH = ("branch", "convert", "import", "change")


def script(all_runs: Sequence[Run]) -> str:
    """The shell script for the runs that have a configuration; empty without any."""
    known = [run for run in all_runs if run.config]
    if not (runs := known[:MOST]):
        return ""
    facts = [run.facts for run in runs]
    versions = dict.fromkeys(
        f"narrowgauge {f.get('version', '?')}, torch {f.get('torch', '?')}" for f in facts
    )
    lines = ["#!/bin/sh", "set -e", f"# Trained with {_word('; '.join(versions))}.", f"mkdir -p {FOLDER}"]
    lines += [f"# The first {MOST} of {len(known)} runs."] if len(known) > MOST else []
    lines += [f"# {line}" for line in dict.fromkeys(map(_data, runs))]
    names = [run.name.replace("/", "-") for run in runs]
    for run, name in zip(runs, names, strict=True):
        lines += ["", *_of_run(run, name)]
    if len(runs) > 1:
        folders = " ".join(shlex.quote(f"{FOLDER}/{name}") for name in names)
        lines += ["", f"narrowgauge report {folders} --out {FOLDER}/report.html"]
    return "\n".join(lines) + "\n"


def _of_run(run: Run, name: str) -> list[str]:
    """Write the configuration and the recipe of a run, and train."""
    config = {key: dict(table) for key, table in run.config.items() if isinstance(table, Mapping)}
    recipe, training = config.setdefault("recipe", {}), config.setdefault("training", {})
    lines = [
        f"# {_word(run.name)} did not start from scratch ({_word(event['reason'])}), and this does."
        for event in run.events
        if event["event"] in _NOT_FROM_SCRATCH and event.get("reason")
    ]
    if run.recipe_text and recipe.get("name") not in recipe_names():
        recipe["name"] = path = f"{FOLDER}/{name}.recipe.toml"
        if len(run.recipe_text) <= MOST_TEXT:  # as it was when the run began: the guard raises it again
            lines += _file(path, run.recipe_text.partition(RAISED)[0])
        else:  # it was cut
            missing = f"copy recipe.toml of the run {run.name} to {path}: it is too long for a page"
            lines += [f"test -f {shlex.quote(path)} || {{ echo {shlex.quote(missing)} >&2; exit 1; }}"]
    if not training.get("threads") and isinstance(run.facts.get("threads"), int):
        training["threads"] = run.facts["threads"]  # the last digits on a CPU depend on them
    lines += _file(f"{FOLDER}/{name}.toml", toml_tables(config))
    toml, out = (shlex.quote(f"{FOLDER}/{name}{end}") for end in (".toml", ""))
    products, processes = run.facts.get("products"), run.facts.get("processes")
    program = "narrowgauge"
    if isinstance(processes, int) and processes > 1:
        program = f"torchrun --standalone --nproc-per-node {processes} -m narrowgauge"
    before = f"{PRODUCTS}={shlex.quote(str(products))} " if products else ""
    return [*lines, f"{before}{program} train {toml} --out {out}"]


def _file(path: str, text: str) -> list[str]:
    """A here-document; its mark stands on no line of the text."""
    mark = "END"
    while mark in text.splitlines():
        mark += "_"
    return [f"cat > {shlex.quote(path)} <<'{mark}'", text.rstrip("\n"), mark]


def _data(run: Run) -> str:
    """The source of the tokens, in a line."""
    source, digest = run.setting("data", "source"), run.facts.get("corpus")
    return f"Data: {_word(source or '')}" + (f" (SHA-256 of the corpus: {_word(digest)})" if digest else "")


def _word(value: object) -> str:
    """A value for a comment, in one line."""
    return " ".join(str(value).split())

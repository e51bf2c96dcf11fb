"""Reads a command line: the options of its verb, and the configuration that it gives."""

import argparse
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.recipes import GROUPS
from narrowgauge.system.errors import UserError, nearest, unknown
from narrowgauge.trainer import data, training  # each name is imported on first use
from narrowgauge.trainer.cli import signature
from narrowgauge.trainer.cli.parser import Parser
from narrowgauge.trainer.cli.table import VERBS, function_of
from narrowgauge.trainer.training.config.synonyms import SHORT, other_names, plain

OF_THE_COMMAND = ("-h", "--help", "-V", "--version")  # options without a verb


def read_line(words: list[str]) -> argparse.Namespace:
    """Parse a command line that begins with a verb.

    Raises:
        UserError: The line has a mistake.
    """
    check_verb(words)
    options = parser_of(words[0]).read(words[1:])
    options.command_line = words
    return options


def check_verb(words: list[str]) -> None:
    """Refuse a command line whose first word is not a verb.

    Raises:
        UserError: with the nearest verb.
    """
    if not words or words[0] in VERBS or words[0] in OF_THE_COMMAND:
        return
    first = words[0]
    if not first.startswith("-"):
        raise unknown("verb", first, VERBS)
    if near := nearest(first, OF_THE_COMMAND):
        raise UserError(f"unknown option {first!r}; the nearest is {near!r}")
    raise UserError(
        f"unknown option {first!r}; a verb comes first, as in narrowgauge train {first}; see "
        "'narrowgauge --help'"
    )


@cache
def parser_of(verb: str) -> Parser:
    """The parser of a verb, with its options."""
    function = function_of(verb)
    p = Parser(verb, signature.title_of(function), signature.examples_of(function), verbs_with)
    for option in signature.options_of(function):
        option.add_to(p)
    if signature.takes_keys(function):
        _add_config_options(p)
    return p


def verbs_with(option: str) -> list[str]:
    """The verbs that have an option of this name, else those with a key that it may mean; as in the help."""
    return [verb for verb in VERBS if parser_of(verb).has(option)] or [
        verb for verb in VERBS if parser_of(verb).has_key(option)
    ]


def _add_config_options(p: Parser) -> None:
    """Add CONFIG.toml, --out, the short options, and one option for each key of the configuration."""
    keys = training.config_keys()
    p.take_keys()
    text = "a file, or a name that ships, such as gpt2-124m"
    p.add_argument("config", metavar="CONFIG.toml", type=Path, nargs="?", help=text)
    if not p.has("--out"):
        p.add_argument("--out", type=Path, metavar="DIR", help="the run directory")
    for short, name in SHORT.items():
        text = str(keys[name]).replace("%", "%%")
        p.add_argument(f"--{short}", dest=name, metavar=keys[name].takes, help=text)
    for name, key in keys.items():
        is_switch = key.takes.startswith("true|false")
        p.add_argument(
            f"--{name}",
            dest=name,
            metavar=key.takes,
            action=signature.Join if key.takes.endswith(",...") else "store",
            help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
        )


def key_names() -> dict[str, str]:
    """The key of each unambiguous name: the short options, endings of keys, synonyms."""
    names = {name: keys[0] for name, keys in other_names(training.config_keys()).items() if len(keys) == 1}
    return names | {name.replace("-", "_"): key for name, key in names.items()} | SHORT


def require_sources(options: argparse.Namespace) -> None:
    """Refuse a source of data that is not there, before torch is imported; others read none."""
    if options.verb in ("plan", "advise", "bench", "doctor"):
        return
    has_keys = hasattr(options, "config")
    source = config_values(options).get("data", {}).get("source") if has_keys else vars(options).get("data")
    if isinstance(source, str) and (absent := data.why_absent(source)):
        raise UserError(absent)


def config_values(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Nested values of the TOML file, overridden by the command line."""
    if options.config and plain(str(options.config).partition("=")[0]) in other_names(training.config_keys()):
        raise UserError(
            f"{str(options.config)!r} is not a configuration file; options begin with --, as in --steps 100"
        )
    values: dict[str, dict[str, Any]] = training.load_values(options.config) if options.config else {}
    given: Mapping[str, Any] = {k: v for k, v in vars(options).items() if "." in k and v is not None}
    for group, places in GROUPS.items():  # a group on the command line replaces its places in the file
        if f"recipe.{group}" in given:
            for place in places:
                values.get("recipe", {}).pop(place, None)
    for key, value in given.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return values

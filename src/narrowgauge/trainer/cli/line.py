"""Reads a command line: the options of its verb."""

import argparse
from functools import cache

from narrowgauge.system.errors import UserError, nearest, unknown
from narrowgauge.trainer import data  # each name is imported on first use
from narrowgauge.trainer.cli import signature
from narrowgauge.trainer.cli.parser import Parser
from narrowgauge.trainer.cli.table import VERBS, function_of
from narrowgauge.trainer.laboratory.arguments import config_values

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
        p.take_keys()
    return p


def verbs_with(option: str) -> list[str]:
    """The verbs that have an option of this name, else those with a key that it may mean; as in the help."""
    return [verb for verb in VERBS if parser_of(verb).has(option)] or [
        verb for verb in VERBS if parser_of(verb).has_key(option)
    ]


def require_sources(options: argparse.Namespace) -> None:
    """Refuse a source of data that is not there, before torch is imported; others read none."""
    if options.verb in ("plan", "advise", "bench", "doctor"):
        return
    has_keys = hasattr(options, "config")
    source = config_values(options).get("data", {}).get("source") if has_keys else vars(options).get("data")
    if isinstance(source, str) and (absent := data.why_absent(source)):
        raise UserError(absent)

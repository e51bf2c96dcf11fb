"""Parses a command line into options, making only the parser of the line's verb."""

import argparse

from narrowgauge.cli.options import add_options
from narrowgauge.cli.parsing.key_parser import KeyParser
from narrowgauge.cli.parsing.parser import check_verb, command_parser


def read_line(words: list[str]) -> argparse.Namespace:
    """Parse a command line that begins with a verb.

    Raises:
        UserError: The line has a mistake.
    """
    check_verb(words)
    parser, verbs = command_parser(KeyParser)
    add_options(words[0], verbs[words[0]])
    options, rest = parser.parse_known_args(words)
    if rest:
        raise options.parser.unknown_argument(rest[0])
    options.command_line = words
    return options

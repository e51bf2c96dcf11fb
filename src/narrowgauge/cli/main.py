"""The command: runs a command line, importing as little as possible.

Help, usage errors and the tables of what exists do not need torch. A verb is imported only after its command
line has been parsed; if torch is missing or cannot be imported, the message gives the reason and the fix.
"""

import io
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from narrowgauge.cli.ending import to_the_end
from narrowgauge.cli.installed import NotInstalled, missing, require_torch, too_old
from narrowgauge.cli.parsing.parser import Parser, add_doctor_options, check_verb, command_parser, described
from narrowgauge.cli.parsing.verbs import VERBS, Action, Verb
from narrowgauge.cluster.doctor.facts import LIMITS
from narrowgauge.cluster.doctor.software import folder_of
from narrowgauge.operating_system import require_posix


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    warnings.formatwarning = lambda message, *_, **__: f"narrowgauge: warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):  # a character that a terminal lacks ends no run
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")
    return to_the_end(lambda: _run(words))


def _run(words: list[str]) -> int | None:
    check_verb(words)
    if not words or words[0] not in VERBS:
        parser, _ = command_parser(Parser)
        parser.parse_args(words)
        parser.print_help()
        return None
    return _doctor(words) if words[0] == "doctor" else _verb(words)


def _doctor(words: list[str]) -> int | None:
    """Run the verb that works where packages are missing, with its separate parser and options."""
    try:
        doctor = import_module("narrowgauge.cli.verbs.doctor")
    except ImportError:
        if folder_of("rich") is None:
            raise missing(["rich"]) from None
        raise
    parser, verbs = command_parser(Parser)
    add_doctor_options(verbs["doctor"])
    options, rest = parser.parse_known_args(words)
    if rest:
        raise options.parser.unknown_argument(rest[0])
    code: int = doctor.run(options)
    return code


def _verb(words: list[str]) -> int | None:
    """Run another verb.

    Raises:
        UserError: The line has a mistake, or the verb needs another operating system.
        NotInstalled: torch, or another package, does not import.
    """
    verb = VERBS[words[0]]
    if verb.has_posix:
        require_posix(words[0])
    names = [name for name in LIMITS["packages"] if name != "torch" and folder_of(name) is None]
    if names:
        if {"-h", "--help"} & set(words):
            print(f"usage: narrowgauge {words[0]} ...\n\n{described(words[0])}")
        raise missing(names)
    from rich.console import Console

    from narrowgauge.cli.line import read_line
    from narrowgauge.cli.parsing.options import require_sources

    options = read_line(words)
    require_sources(options)
    with Console(stderr=True).status("starting ..."):  # on a terminal; torch takes seconds to import
        action = _loaded(verb)
    return action(options)


def _loaded(verb: Verb) -> Action:
    """The function of a verb, imported."""
    if verb.has_torch:
        require_torch()
    try:
        return verb.load()
    except (ImportError, AttributeError):  # caused by a name that this torch does not have
        if sentence := too_old():
            raise NotInstalled(sentence) from None
        raise

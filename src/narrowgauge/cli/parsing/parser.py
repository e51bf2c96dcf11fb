"""A command-line parser whose errors are one sentence, and the parser of the whole command."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import narrowgauge
from narrowgauge.cli.parsing.verbs import VERBS, grouped
from narrowgauge.errors import UserError, nearest, unknown

_OF_THE_COMMAND = ("-h", "--help", "-V", "--version")  # options without a verb


class _Store(argparse.Action):
    """Stores the value of an option; a list (`A,B` or `KEY,...`) continues what the option has already."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        is_list = str(self.metavar).endswith(",...") or self.metavar in ("A,B", "A,B,C")
        is_more = is_list and before is not self.default
        setattr(namespace, self.dest, f"{before},{values}" if is_more else values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence and name the nearest option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._words: Sequence[str] = ()
        for kind, read in ((int, _integer), (float, _number), (Path, _path)):
            self.register("type", kind, read)  # the same types, with sentences as errors
        self.register("action", None, _Store)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, and keep them: an option that seems to be missing may be misspelt among them."""
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the usage error as a `UserError`."""
        if "required" in message:
            words = takewhile(lambda word: word != "--", self._words)
            options = (word for word in words if word.startswith("--"))
            if misspelt := [
                word for word in options if word.split("=")[0] not in self._option_string_actions
            ]:
                raise self.unknown_argument(misspelt[0])
        raise UserError(f"{message}; see '{self.prog} --help'")

    def unknown_argument(self, argument: str) -> UserError:
        """The error for an argument that no option takes; it suggests the nearest option."""
        if argument.startswith("-"):
            return self.unknown_option(argument.split("=")[0], self._option_string_actions)
        takes = [str(action.metavar) for action in self._actions if not action.option_strings]
        return UserError(
            f"unknown argument {argument!r}; {self.prog} takes {' and '.join(takes) or 'none'}, and options "
            f"begin with --; see '{self.prog} --help'"
        )

    def unknown_option(self, name: str, known: Iterable[str]) -> UserError:
        """The error for an unknown option: the nearest option, or where all of them are listed."""
        error = unknown("option", name, known)
        return error if nearest(name, known) else UserError(f"{error}; see '{self.prog} --help'")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush the output, then exit as argparse does."""
        print(end="", flush=True)  # a closed pipe under --help can still be caught here
        super().exit(status, message)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _path(text: str) -> Path:
    """A path; an empty one would be the current directory, and usually comes from an unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; name a file or directory")
    return Path(text)


class CommandParser(Parser):
    """The parser of the command, whose help shows the verbs in groups."""

    def format_help(self) -> str:
        """The usage, the verbs by group, and the options."""
        usage, _, rest = super().format_help().partition("\n\n")
        options = rest[rest.index("options:") :].partition("\n\n")
        width = shutil.get_terminal_size().columns - 2
        lines = [usage, "", str(self.description)]
        for group, names in grouped().items():
            lines += ["", f"{group}:"]
            for name in names:
                indent = " " * 18
                text = textwrap.fill(
                    VERBS[name].line, max(width, 40), initial_indent=indent, subsequent_indent=indent
                )
                lines.append(f"    {name}".ljust(18) + text.lstrip())
        return "\n".join([*lines, "", options[0].rstrip(), "", str(self.epilog), ""])


P = TypeVar("P", bound=Parser)


def command_parser(parser_of_verb: type[P]) -> tuple[Parser, Mapping[str, P]]:
    """The parser of the command, and the parsers of its verbs by name, still without options."""
    parser = CommandParser(
        prog="narrowgauge",
        description="Pre-train language models in low precision, and see what each format did.",
        epilog="'narrowgauge VERB --help' explains a verb; 'narrowgauge doctor' checks this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-V",
        "--version",
        action="version",
        version=f"narrowgauge {narrowgauge.__version__}",
        help="show the version and exit",
    )
    parser.set_defaults(verb="", parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", parser_class=parser_of_verb)

    for name, verb in VERBS.items():
        p = verbs.add_parser(name, help=verb.line, description=described(name), allow_abbrev=False)
        p.set_defaults(verb=name, parser=p)
    return parser, verbs.choices


def described(verb: str) -> str:
    """The help line of a verb, as a sentence."""
    line = VERBS[verb].line
    return f"{line[0].upper()}{line[1:]}."


def check_verb(words: list[str]) -> None:
    """Refuse a command line whose first word is not a verb.

    Raises:
        UserError: with the nearest verb.
    """
    if not words or words[0] in VERBS or words[0] in _OF_THE_COMMAND:
        return
    first = words[0]
    if not first.startswith("-"):
        raise unknown("verb", first, VERBS)
    near = nearest(first, _OF_THE_COMMAND)
    if near:
        raise UserError(f"unknown option {first!r}; the nearest is {near!r}")
    raise UserError(
        f"unknown option {first!r}; a verb comes first, as in narrowgauge train {first}; see "
        "'narrowgauge --help'"
    )


def add_doctor_options(p: argparse.ArgumentParser) -> None:
    """Add the options of the verb that also works where packages are missing."""
    p.add_argument("--json", action="store_true", help="print a JSON list of {item, status, found, fix}")
    p.add_argument("--data", metavar="SOURCE", help="also check this data (as for train --data)")
    p.add_argument("--tokenizer", metavar="T", help="also check this tokenizer: bytes, bpe-N or a file")

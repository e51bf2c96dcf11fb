"""A parser of command lines whose errors are one sentence, and the parser of the whole command."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn, TypeVar

import narrowgauge
from narrowgauge.cli.parsing.verbs import VERBS
from narrowgauge.errors import UserError, unknown

Action = Callable[[argparse.Namespace], int | None]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence and name the nearest option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, and keep them: an option that seems to be missing may be one of them, misspelt."""
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as a `UserError`."""
        if "required" in message:
            words = takewhile(lambda word: word != "--", self._words)
            options = (word for word in words if word.startswith("--"))
            if misspelt := [
                word for word in options if word.split("=")[0] not in self._option_string_actions
            ]:
                raise self.unknown_argument(misspelt[0])
        raise UserError(f"{message}; see '{self.prog} --help'")

    def unknown_argument(self, argument: str) -> UserError:
        """The error for an argument that no option takes; it names the nearest option."""
        kind = "option" if argument.startswith("-") else "argument"
        return unknown(kind, argument.split("=")[0], self._option_string_actions)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush the output, then end as argparse does."""
        sys.stdout.flush()  # here a closed pipe under --help can still be caught
        super().exit(status, message)


P = TypeVar("P", bound=Parser)


def command_parser(parser_of_verb: type[P]) -> tuple[Parser, Callable[[str, Action], P], Mapping[str, P]]:
    """The parser of the command without any verb, a function that adds a verb, and the parsers of verbs."""
    parser = Parser(
        prog="narrowgauge",
        description="Pre-train language models in narrow numbers, and see what the numbers did.",
        epilog="'narrowgauge VERB --help' explains each verb; 'narrowgauge doctor' looks at this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-V",
        "--version",
        action="version",
        version=f"narrowgauge {narrowgauge.__version__}",
        help="show the version and exit",
    )
    parser.set_defaults(action=lambda options: parser.print_help(), parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", parser_class=parser_of_verb)

    def verb(name: str, action: Action) -> P:
        p = verbs.add_parser(name, help=VERBS[name], description=described(name), allow_abbrev=False)
        p.set_defaults(action=action, parser=p)
        return p

    return parser, verb, verbs.choices


def described(verb: str) -> str:
    """The line that explains a verb, as a sentence."""
    line = VERBS[verb]
    return f"{line[0].upper()}{line[1:]}."


def check_verb(words: list[str]) -> None:
    """Refuse a line whose first word is no verb.

    Raises:
        UserError: with the nearest verb.
    """
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        raise unknown("verb", words[0], VERBS)

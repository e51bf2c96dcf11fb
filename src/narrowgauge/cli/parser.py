"""A command-line parser that finds options by their other names, and whose errors are one sentence.

The help of a verb fits on one screen; `--help all` and `--help SECTION` list the keys of the configuration.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge import training  # each name is imported on first use, and this one needs pydantic
from narrowgauge.cli.help import COLUMN, keys_text, sections_text
from narrowgauge.errors import UserError, nearest, unknown
from narrowgauge.training.config.synonyms import key_of, other_names, plain, unknown_key

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)[\w.+-]*\Z")  # also -1e-3, which argparse takes for an option
_LONG_WITH_ONE_DASH = re.compile(r"-[a-z][\w-]+")


class HelpAction(argparse.Action):
    """Print the help of a verb and exit; with a topic, the keys of one section or of all."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def take_topic(self) -> None:
        """Allow the option to take a topic."""
        self.nargs, self.metavar = "?", "all|SECTION"
        self.help = "show this and exit; all: every key; SECTION: its keys"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print the requested help."""
        print(keys_text(values) if isinstance(values, str) else parser.format_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """The parser of a verb.

    Attributes:
        names: The keys that options may mean by another name (`synonyms`); empty for a verb without keys.
    """

    def __init__(self, verb: str, text: str, examples: Sequence[str], verbs_with: Callable[..., Any]) -> None:
        """Make a parser that has only `--help`.

        Args:
            verb: The verb.
            text: What it does, in a sentence.
            examples: Command lines that end its help.
            verbs_with: Finds the verbs that have an option.
        """
        super().__init__(f"narrowgauge {verb}", description=text, allow_abbrev=False, add_help=False)
        self.verb, self.examples, self.verbs_with = verb, examples, verbs_with
        self.names: Mapping[str, training.Key] = {}
        self._words: Sequence[str] = ()
        self._negative_number_matcher = _NEGATIVE
        for kind, read in ((int, _integer), (float, _number), (Path, _path)):
            self.register("type", kind, read)  # the same types, with sentences as errors
        self.help_option = HelpAction(("-h", "--help"), "help", help="show this and exit")
        self._add_action(self.help_option)
        self.set_defaults(verb=verb, parser=self)

    def take_keys(self) -> None:
        """Find options by the other names of the configuration's keys; list the keys with `--help all`."""
        self.names = training.config_keys() | {"out": training.Key("", "", "DIR", "output-dir")}
        self.usage = "%(prog)s [CONFIG.toml] [OPTION VALUE ...]"
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=COLUMN)
        self.help_option.take_topic()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, each option under its canonical name; one that seems missing may be misspelt."""
        self._words = [self._named(word) for word in args or ()]
        return super().parse_known_args(self._words, namespace)

    def _named(self, word: str) -> str:
        """The word, with another name of an option replaced by its canonical name."""
        if _LONG_WITH_ONE_DASH.fullmatch(word):  # argparse would parse -help as -h with elp
            raise self.unknown_argument(word)
        name, equals, value = word.partition("=")
        options = self._option_string_actions
        if not name.startswith("--") or " " in name or name == "--" or name in options:
            return word
        own = plain(name[2:])
        aliased = (key for key, known in _known_keys().items() if known.alias == own)
        ways = [f"--{own}", *(f"--{plain(key.rpartition('.')[2])}" for key in aliased)]
        named = next((way for way in ways if way in options), None)
        if named is None and self.names:
            named = f"--{key_of(name[2:], self.names) or name[2:]}"
        return f"{named or name}{equals}{value}"

    def has(self, option: str) -> bool:
        """Whether the verb has an option of this name."""
        return option in self._option_string_actions

    def has_key(self, option: str) -> bool:
        """Whether the verb has a key that this name may mean."""
        return plain(option[2:]) in other_names(self.names)

    def format_help(self) -> str:
        """The help on one screen."""
        text = super().format_help() + (sections_text() if self.names else "")
        examples = "".join(f"  {line}\n" for line in self.examples)
        return f"{text}\nexamples:\n{examples}" if examples else text

    def error(self, message: str) -> NoReturn:
        """Raise the usage error as a `UserError`."""
        if "required" in message:
            words = takewhile(lambda word: word != "--", self._words)
            options = (word for word in words if word.startswith("--"))
            if misspelt := [word for word in options if not self.has(word.split("=")[0])]:
                raise self.unknown_argument(misspelt[0])
        raise UserError(f"{message}; see '{self.prog} --help'")

    def unknown_argument(self, argument: str) -> UserError:
        """The error for an argument that no option takes: the verbs that have it, or the nearest option."""
        if argument.endswith(("}", ",")) or argument.startswith("{"):
            return UserError(
                f"{argument!r} is part of a table that the shell has split at its spaces; put the table in "
                "single quotes, as in --recipe.fprop.x '{cast = \"fp4-row\", outliers = 0.99}'"
            )
        if not argument.startswith("-"):
            takes = [str(action.metavar) for action in self._actions if not action.option_strings]
            return UserError(
                f"unknown argument {argument!r}; {self.prog} takes {' and '.join(takes) or 'none'}, and "
                f"options begin with --; see '{self.prog} --help'"
            )
        name = argument.split("=")[0]
        if "." in name and self.names:
            return unknown_key(name.lstrip("-"), self.names, "--")
        if verbs := self.verbs_with(name):
            *first, last = verbs
            have = f"{', '.join(first)} and {last} have" if first else f"{last} has"
            return UserError(f"unknown option {name!r}; {have} it, {self.verb} does not")
        others = (f"--{other}" for other in other_names(self.names) if len(other) > 3)  # not --dy
        return self._unknown_option(name, [*self._option_string_actions, *others])

    def _unknown_option(self, name: str, known: Iterable[str]) -> UserError:
        error, known = unknown("option", name, known), list(known)
        return error if nearest(name, known) else UserError(f"{error}; see '{self.prog} --help'")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush the output, then exit as argparse does."""
        print(end="", flush=True)  # a closed pipe under --help can still be caught here
        super().exit(status, message)


def _known_keys() -> "Mapping[str, training.Key]":
    """The keys of the configuration; none where pydantic is missing, which the doctor answers."""
    try:
        return training.config_keys()
    except ImportError:
        return {}


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

"""A command-line parser that finds options by their other names, and whose errors are one sentence.

The help of a verb fits on one screen; `--help all` and `--help SECTION` list the keys of the configuration.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.system.errors import UserError, nearest, unknown
from narrowgauge.trainer import training  # each name is imported on first use, and this one needs pydantic
from narrowgauge.trainer.cli.help import COLUMN, keys_text, sections_text
from narrowgauge.trainer.cli.signature import Join, reader
from narrowgauge.trainer.training.config.synonyms import SHORT, key_of, other_names, plain, unknown_key

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)[\w.+-]*\Z")  # also -1e-3, which argparse takes for an option
_LONG_WITH_ONE_DASH = re.compile(r"-[a-z][\w-]+")


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
        self._negative_number_matcher = _NEGATIVE
        self.help_option = self.add_argument("-h", "--help", action="store_true", help="show this and exit")
        self.set_defaults(verb=verb, parser=self)

    def take_keys(self) -> None:
        """Add CONFIG.toml, --out, the short options, and one option for each key of the configuration.

        Options are found by the other names of the keys, which `--help all` lists.
        """
        keys = training.config_keys()
        self.names = keys | {"out": training.Key("", "", "DIR", "output-dir")}
        self.usage = "%(prog)s [CONFIG.toml] [OPTION VALUE ...]"
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=COLUMN)
        self.help_option.nargs, self.help_option.metavar = "?", "all|SECTION"
        self.help_option.help = "show this and exit; all: every key; SECTION: its keys"
        text = "a file, or a name that ships, such as gpt2-124m"
        self.add_argument("config", metavar="CONFIG.toml", type=reader(Path), nargs="?", help=text)
        if not self.has("--out"):
            self.add_argument("--out", type=reader(Path), metavar="DIR", help="the run directory")
        for short, name in SHORT.items():
            text = str(keys[name]).replace("%", "%%")
            self.add_argument(f"--{short}", dest=name, metavar=keys[name].takes, help=text)
        for name, key in keys.items():
            how: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            how |= {"action": Join} if key.takes.endswith(",...") else {}
            how |= {"nargs": "?", "const": "true"} if key.takes.startswith("true|false") else {}
            self.add_argument(f"--{name}", dest=name, metavar=key.takes, **how)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in the words after the verb; ends with the help if that is asked for.

        Raises:
            UserError: The verb does not take a word.
        """
        own = list(takewhile(lambda word: word != "--", words))
        if asked := {"-h", "--help"} & {*own}:
            topic = words[words.index(asked.pop()) + 1 :][:1]
            has_topic = self.names and topic and not topic[0].startswith("-")
            print(keys_text(topic[0]) if has_topic else self.format_help(), end="", flush=True)
            sys.exit()
        if not self.has_rest:
            words = [*map(self._named, own), *words[len(own) :]]
        options, rest = self.parse_known_args(words)
        if rest:
            raise self.unknown_argument(rest[0])
        return options

    @property
    def has_rest(self) -> bool:
        """Whether the verb takes the words of another line."""
        return any(action.nargs == argparse.REMAINDER for action in self._actions)

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
        if named not in options:
            raise self.unknown_argument(word)
        return f"{named}{equals}{value}"

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
        known = [*self._option_string_actions, *others]
        error = unknown("option", name, known)
        return error if nearest(name, known) else UserError(f"{error}; see '{self.prog} --help'")


def _known_keys() -> "Mapping[str, training.Key]":
    """The keys of the configuration; none where pydantic is missing, which the doctor answers."""
    try:
        return training.config_keys()
    except ImportError:
        return {}

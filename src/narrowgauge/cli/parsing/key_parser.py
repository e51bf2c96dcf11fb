"""A parser of lines that name keys of the configuration, each by several names, with help by section."""

import argparse
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from narrowgauge import training
from narrowgauge.cli.parsing.help import COLUMN, HelpAction, sections_text
from narrowgauge.cli.parsing.parser import Parser
from narrowgauge.errors import UserError
from narrowgauge.training.config.synonyms import key_of, other_names, plain, unknown_key

LIST = "A,B"  # in the metavar of an option whose values, between commas, are names
_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)[\w.+-]*\Z")  # also -1e-3, which argparse takes for an option
_LONG_WITH_ONE_DASH = re.compile(r"-[a-z][\w-]+")


class KeyParser(Parser):
    """A parser that finds the keys of the configuration by their other names, too.

    Attributes:
        names: The keys that options may mean by another name (`synonyms`); empty for a verb without keys.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self._negative_number_matcher = _NEGATIVE
        self.names: tuple[str, ...] = ()
        self.help_option = HelpAction(("-h", "--help"), "help", help="show this and end")
        self._add_action(self.help_option)

    def take_keys(self) -> None:
        """Find options by the other names of the configuration's keys, and show the keys by `--help all`."""
        self.names = (*training.config_keys(), "out")
        self.usage = "%(prog)s [CONFIG.toml] [OPTION VALUE ...]"
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=COLUMN)
        self.help_option.take_topic()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, each option under the name that it has here."""
        words = [self._named(word) for word in args] if self.names else args
        return super().parse_known_args(self._whole_lists(words or ()), namespace)

    def _whole_lists(self, words: Sequence[str]) -> list[str]:
        """The words, in which a list that the shell has cut behind its commas is one: `bf16, fp8`."""
        whole: list[str] = []
        for word in words:
            before = whole[-1] if whole else ""
            name = before.split("=")[0] if before.startswith("--") else "".join(whole[-2:-1])
            action = self._option_string_actions.get(name)
            takes = str(action.metavar) if action is not None else ""
            is_cut = before.endswith(",") or (word.startswith(",") and before != name)
            fits = word.strip(",").isdecimal() if takes.startswith("N|") else not word.startswith("-")
            if LIST in takes and is_cut and fits:
                whole[-1] += word
            else:
                whole.append(word)
        return whole

    def _named(self, word: str) -> str:
        """The word; an option by another name gets its own."""
        if _LONG_WITH_ONE_DASH.fullmatch(word):  # argparse would read -help as -h with elp
            raise self.unknown_argument(word)
        name, equals, value = word.partition("=")
        options = self._option_string_actions
        if not name.startswith("--") or " " in name or name == "--" or name in options:
            return word
        own = f"--{plain(name[2:])}"
        if own not in options:
            own = f"--{key_of(name[2:], self.names) or name[2:]}"
        return f"{own}{equals}{value}"

    def format_help(self) -> str:
        """The help on one screen."""
        text = super().format_help()
        return text + sections_text(self.prog.split()[-1]) if self.names else text

    def unknown_argument(self, argument: str) -> UserError:
        """The error for an argument that no option takes; it names the nearest option."""
        if argument.endswith(("}", ",")) or argument.startswith("{"):
            return UserError(
                f"{argument!r} is a piece of a table that the shell has cut at its blanks; put the table in "
                "single quotes, as in --recipe.fprop.x '{cast = \"fp4-row\", outliers = 0.99}'"
            )
        name = argument.split("=")[0]
        if not argument.startswith("-"):
            return super().unknown_argument(argument)
        if "." in name and self.names:
            return unknown_key(name.lstrip("-"), self.names, "--")
        others = (f"--{other}" for other in other_names(self.names) if len(other) > 3)  # --dy is near to much
        return self.unknown_option(name, [*self._option_string_actions, *others])

"""Options that verbs share: a configuration file, its keys, and a parser whose errors are one sentence."""

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.cli.help import COLUMN, HelpAction, sections_text
from narrowgauge.errors import UserError, unknown
from narrowgauge.training import config_keys, load_values
from narrowgauge.training.config.synonyms import key_of, other_names, plain, unknown_key

# Short options for the keys that are used most.
SHORT = {
    "model": "model.name",
    "data": "data.source",
    "recipe": "recipe.name",
    "backend": "recipe.backend",
    "steps": "training.steps",
    "seed": "training.seed",
    "device": "training.device",
    "memory-limit": "training.memory_limit",
}
_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)[\w.+-]*\Z")  # also -1e-3, which argparse takes for an option


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence and name the nearest option.

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
        self.names = (*config_keys(), "out")
        self.usage = "%(prog)s [CONFIG.toml] [OPTION VALUE ...]"
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=COLUMN)
        self.help_option.take_topic()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, each option under the name that it has here."""
        words = [self._named(word) for word in args] if self.names else args
        return super().parse_known_args(words, namespace)

    def _named(self, word: str) -> str:
        """The word; an option by another name gets its own."""
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

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as a `UserError`."""
        raise UserError(f"{message}; see '{self.prog} --help'")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Flush the output, then end as argparse does."""
        sys.stdout.flush()  # here a closed pipe under --help can still be caught
        super().exit(status, message)


def add_config_options(p: Parser) -> None:
    """Add CONFIG.toml, --out, the short options and one option for each key of the configuration."""
    keys = config_keys()
    p.take_keys()
    p.add_argument("config", metavar="CONFIG.toml", type=Path, nargs="?", help="a configuration file")
    p.add_argument("--out", type=Path, metavar="DIR", help="the run directory")
    for short, name in SHORT.items():
        text = str(keys[name]).replace("%", "%%")
        p.add_argument(f"--{short}", dest=name, metavar=keys[name].takes, help=text)
    for name, key in keys.items():
        is_switch = key.takes == "true|false"
        p.add_argument(
            f"--{name}",
            dest=name,
            metavar=key.takes,
            help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
        )


def positive_integer(text: str) -> int:
    """Convert the text of an option to a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def unknown_argument(argument: str, parser: Parser) -> UserError:
    """The error for an argument that no option of `parser` takes; it names the nearest option."""
    if argument.endswith(("}", ",")) or argument.startswith("{"):
        return UserError(
            f"{argument!r} is a piece of a table that the shell has cut at its blanks; put the table in "
            "single quotes, as in --recipe.fprop.x '{cast = \"fp4-row\", outliers = 0.99}'"
        )
    name = argument.split("=")[0]
    if not argument.startswith("-"):
        if parser.names:
            return UserError(
                f"unknown argument {argument!r}; one configuration file may be given; options begin with --"
            )
        return unknown("argument", name, parser._option_string_actions)
    if "." in name and parser.names:
        return unknown_key(name.lstrip("-"), parser.names, "--")
    others = (f"--{other}" for other in other_names(parser.names) if len(other) > 3)  # --dy is near to much
    return unknown("option", name, [*parser._option_string_actions, *others])


def key_names() -> dict[str, str]:
    """The key of each name that means one: the short options, endings of keys, synonyms."""
    names = {name: keys[0] for name, keys in other_names(config_keys()).items() if len(keys) == 1}
    return names | {name.replace("-", "_"): key for name, key in names.items()} | SHORT


def config_values(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Nested values of the TOML file; values of the command line replace them."""
    if options.config and plain(str(options.config).partition("=")[0]) in other_names(config_keys()):
        raise UserError(
            f"{str(options.config)!r} is no configuration file; options begin with --, as in --steps 100"
        )
    values: dict[str, dict[str, Any]] = load_values(options.config) if options.config else {}
    for key, value in vars(options).items():
        if "." in key and value is not None:
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
    return values

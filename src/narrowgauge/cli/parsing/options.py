"""Options shared by verbs: a configuration file and its keys."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge import data, training  # each name is imported on first use
from narrowgauge.cli.parsing.key_parser import KeyParser
from narrowgauge.errors import UserError
from narrowgauge.recipes import GROUPS
from narrowgauge.training.config.synonyms import other_names, plain

T = TypeVar("T")

# Short options for the most common keys.
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


def add_config_options(p: KeyParser) -> None:
    """Add CONFIG.toml, --out, the short options, and one option for each key of the configuration."""
    keys = training.config_keys()
    p.take_keys()
    p.add_argument(
        "config",
        metavar="CONFIG.toml",
        type=Path,
        nargs="?",
        help="a file, or a name that ships, such as gpt2-124m",
    )
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
            help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
        )


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """A function of the text of an option whose `UserError` becomes the error of that option."""

    def value_of(text: str) -> T:
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value_of


def positive_integer(text: str) -> int:
    """Convert the text of an option to a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def key_names() -> dict[str, str]:
    """The key of each unambiguous name: the short options, endings of keys, synonyms."""
    names = {name: keys[0] for name, keys in other_names(training.config_keys()).items() if len(keys) == 1}
    return names | {name.replace("-", "_"): key for name, key in names.items()} | SHORT


def require_sources(options: argparse.Namespace) -> None:
    """Refuse a source of data that is not there, before torch is imported; the verbs that plan read none."""
    if options.verb in ("plan", "advise", "bench"):
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
    given = {key: value for key, value in vars(options).items() if "." in key and value is not None}
    for group, places in GROUPS.items():  # a group on the command line replaces its places in the file
        if f"recipe.{group}" in given:
            for place in places:
                values.get("recipe", {}).pop(place, None)
    for key, value in given.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return values

"""Options that verbs share: a configuration file and its keys."""

import argparse
from pathlib import Path
from typing import Any

from narrowgauge.training import config_keys, load_values

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


def add_config_options(p: argparse.ArgumentParser) -> None:
    """Add CONFIG.toml, --out, the short options and one option for each key of the configuration."""
    p.add_argument("config", metavar="CONFIG.toml", type=Path, nargs="?", help="configuration file")
    p.add_argument("--out", type=Path, metavar="DIR", help="the run directory")
    for short, key in SHORT.items():
        p.add_argument(f"--{short}", dest=key, metavar="VALUE", help=f"short for --{key}")
    group = p.add_argument_group("any key of the configuration")
    for key, description in config_keys().items():
        text = description.replace("%", "%%")
        group.add_argument(f"--{key}", dest=key, metavar="VALUE", help=text, default=argparse.SUPPRESS)


def positive_integer(text: str) -> int:
    """Convert the text of an option to a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def config_values(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Nested values of the TOML file; values of the command line replace them."""
    values: dict[str, dict[str, Any]] = load_values(options.config) if options.config else {}
    for key, value in vars(options).items():
        if "." in key and value is not None:
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
    return values

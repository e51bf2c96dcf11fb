"""The arguments of verbs: what the command line shows for a value, how it reads one; configurations of them.

A function of these types is at once a function of Python and a verb: `cli.line` makes its options. This
imports no torch, so help and usage errors appear at once.

A configuration comes from a command line, or from sections as dictionaries and a recipe in any form. A recipe
that is a dictionary or an object goes into a file next to the runs, because a run directory names the file of
its recipe, and the same line in another process has to find it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from narrowgauge.recipes import GROUPS, Recipe, RecipeLike, recipe, recipe_names
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.units import parse_count
from narrowgauge.trainer import models, training  # each name is imported when it is used
from narrowgauge.trainer.training.config.synonyms import SHORT, other_names, plain

Line = argparse.Namespace  # a command line with keys of the configuration
#: Takes the name of what is measured, how many parts are done, and their number.
Progress = Callable[[str, int, int], None]
Console = Any  # of rich, where a verb prints
Say = Callable[[str], object]  # prints a line as it is
Section = str | int | float | Mapping[str, Any] | None
Values = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """How a value is written on the command line."""

    metavar: str = ""  # what help shows in its place
    read: Callable[[str], Any] | None = None  # of a text; None: by the type
    is_positional: bool = False  # whether it is given without an option's name
    is_list: bool = False  # whether the values of a repeated option are joined
    nargs: str | None = None  # how many words a positional one takes; None for what its type says
    bare: Any = None  # the value of an option that is given without one
    flag: str = ""  # the option's name, where it is not that of the parameter


def key_names() -> dict[str, str]:
    """The key of each unambiguous name: the short options, endings of keys, synonyms."""
    names = {name: keys[0] for name, keys in other_names(training.config_keys()).items() if len(keys) == 1}
    return names | {name.replace("-", "_"): key for name, key in names.items()} | SHORT


def config_values(line: Line) -> Values:
    """Nested values of the file of a line, overridden by its options."""
    if line.config and plain(str(line.config).partition("=")[0]) in other_names(training.config_keys()):
        raise UserError(
            f"{str(line.config)!r} is not a configuration file; options begin with --, as in --steps 100"
        )
    own: Values = {}
    for key, value in vars(line).items():
        section, dot, name = key.partition(".")
        if dot and value is not None:
            own.setdefault(section, {})[name] = value
    return over(training.load_values(line.config), own) if line.config else own


def over(values: Values, own: Values) -> Values:
    """Nested values, overridden by their own; a group of places replaces all its places."""
    dropped = {place for group in own.get("recipe", {}) for place in GROUPS.get(group, ())}
    merged = dict(values)
    for section, table in own.items():
        kept = {key: value for key, value in values.get(section, {}).items() if key not in dropped}
        merged[section] = kept | table
    return merged


def names(text: str) -> tuple[str, ...]:
    """The words between the commas of a text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers above 0 between the commas of a text."""
    return tuple(map(positive, names(text)))


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse_seeds(text: str) -> int | tuple[int, ...]:
    """The seeds in a text: their number, or which where the text has a comma.

    >>> parse_seeds("3"), parse_seeds("1,7"), parse_seeds("4,")
    (3, (1, 7), (4,))
    """
    words = names(text)
    if not words or not all(word.isdecimal() for word in words) or text in ("0", "00"):
        raise UserError(f"--seeds {text}: write how many, as in 3, or which, as in 1,2,3")
    return tuple(map(int, words)) if "," in text else int(text)


def parse_amount(text: str) -> float:
    """A number above 0, such as 1.9e9, 1.9B or 38B."""
    if not (number := parse_count(text)):
        raise UserError(f"{text!r}: it must be a number such as 1.9e9 or 38B")
    return number


def _model(name: str) -> str:
    models.model_config(name)
    return name


COUNT, NAMES = Form("N", positive), Form("A,B,C", names, is_list=True)
RUN, CAST = Form("RUN", is_positional=True), Form("CAST")
Count = Annotated[int, COUNT]
Names = Annotated[tuple[str, ...], NAMES]
Folder = Annotated[Path, Form("DIR")]
File = Annotated[Path, Form("FILE")]
Source = Annotated[str, Form("SOURCE")]
Amount = Annotated[float, Form("N", parse_amount)]
NamedModel = Annotated[str, Form("NAME", _model)]
Run = Annotated[Path, RUN, "a run, a Hugging Face folder or an llm.c model"]


class Text(TypedDict, total=False):
    """The text and the device of a measurement."""

    data: Annotated[Source | Path | None, "text, if not the run's"]
    batches: Annotated[Count, "batches of held-out text, spread evenly over it (8; 4 with many passes)"]
    batch_size: Annotated[Count | None, "sequences of a batch (the run's micro-batch)"]
    sequence_length: Annotated[Count | None, "tokens of a sequence (the run's)"]
    tokenizer: Annotated[File | str | None, "a tokenizer.json (the model's)"]
    device: Annotated[str, "auto, cpu or cuda (auto)"]


def values_of(line: Line | None, sections: Mapping[str, Section]) -> Values:
    """Nested values of a line, or of keyword arguments: `training={"steps": 6}`, or the short `steps=6`."""
    if line is not None:
        return config_values(line)
    values: Values = {}
    for name, given in sections.items():
        if given is None:
            continue
        if not isinstance(given, Mapping) and (short := name.replace("_", "-")) in SHORT:
            section, _, key = SHORT[short].partition(".")
            given = {key: given}
        else:
            section = name
        if section not in training.Config.model_fields or name == "recipe":
            raise unknown("argument", name, [*training.Config.model_fields, *SHORT])
        if not isinstance(given, Mapping):
            raise UserError(
                f"{name} = {given!r}, but it is a section of the configuration; give its keys, as in "
                f"{name}={{...}}"
            )
        plain = {key: str(v) if isinstance(v, Path) else v for key, v in given.items()}
        values[section] = values.get(section, {}) | plain
    return values


def recipe_name(given: RecipeLike, file: Path) -> str:
    """The value of `recipe.name`: a shipped name, a path, or `file`, which is written."""
    if isinstance(given, str | Path):
        recipe(given)
        return str(given)
    found = recipe(given)
    if found.name in recipe_names() and found == recipe(found.name):
        return found.name
    if Recipe.from_toml(found.text, found.name) != found:
        raise UserError(
            f"recipe {found.name!r} was changed after it was read, and a run keeps its recipe as text; give "
            "a dictionary with all its keys"
        )
    make_directory(file.parent)
    if not file.is_file() or file.read_text(encoding="utf-8") != found.text:
        write_whole(file, found.text)
    return str(file)


def config_of(values: Values, given: RecipeLike | None, backend: str, file: Path | None) -> training.Config:
    """The configuration of some values, under a recipe and a backend if they are given.

    A recipe without a name goes into `file`, if there is one.
    """
    own = {} if backend == "auto" else {"backend": backend}
    if given is not None and (file is not None or isinstance(given, str | Path)):
        values["recipe"], given = own | {"name": recipe_name(given, file or Path())}, None
    elif own:
        values["recipe"] = values.get("recipe", {}) | own
    config = training.make_config(values)
    return config if given is None else config.with_recipe(recipe(given))

"""The options of a verb, made of its function: each parameter is declared once, with its type and its help.

A parameter's type gives the form of its value (`laboratory.arguments`), its default is that of the option,
and its help is the text beside the type, or the docstring's under `Args:`. A `bool` is a switch. What has
another type (a console, a function) is not for the command line. A function with a `line` takes keys of the
configuration: of its parameters only annotated ones are options, because the others are keys as well.
"""

import argparse
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

from narrowgauge.system.errors import UserError
from narrowgauge.system.result import Result
from narrowgauge.trainer.laboratory.arguments import Form, Line

Function = Callable[..., Any]
_PLAIN = (str, int, float, bool, Path)


class Join(argparse.Action):
    """Stores a list, parsed or as text; a second one continues it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store a value."""
        before = getattr(namespace, self.dest, self.default)
        joined = f"{before},{values}" if isinstance(values, str) else (*(before or ()), *values)
        setattr(namespace, self.dest, values if before is self.default else joined)


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type, or a function of an option's text, whose errors are sentences about that option."""

    def value_of(text: str) -> Any:
        if read is Path and not text:  # it would be the current directory, and is usually an unset variable
            raise argparse.ArgumentTypeError("the name is empty; name a file or directory")
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            kind = "a whole number" if read is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None

    return value_of


def add_options(p: argparse.ArgumentParser, function: Function) -> None:
    """Add the options of a verb to its parser, in the order of its function's parameters."""
    hints, described = get_type_hints(function, include_extras=True), described_parameters(function)
    keys = takes_keys(function)  # of which some are parameters of Python as well
    for name, parameter in inspect.signature(function).parameters.items():
        if get_origin(hints[name]) is Unpack:
            for keyword, hint in keywords_of(function).items():
                _add(p, keyword, hint, None)
        elif not keys or get_origin(hints[name]) is Annotated:
            _add(p, name, hints[name], parameter.default, described.get(name, ""))
    prints = "console" in hints
    if isinstance(answer := hints.get("return"), type) and issubclass(answer, Result) and not prints:
        p.add_argument("--json", action="store_true", help="print JSON")


def keywords_of(function: Function) -> dict[str, Any]:
    """The types of the keywords that a function takes as a TypedDict, which several functions share."""
    hints = get_type_hints(function, include_extras=True).values()
    found = [get_args(hint)[0] for hint in hints if get_origin(hint) is Unpack]
    return get_type_hints(found[0], include_extras=True) if found else {}


def _add(p: argparse.ArgumentParser, name: str, hint: Any, default: Any, text: str = "") -> None:
    """Add the option of a parameter, unless its type is not for the command line."""
    kind, notes = _taken_apart(hint)
    forms = [vars(note) for note in notes if isinstance(note, Form)]
    if not (forms or kind in _PLAIN or get_origin(kind) is Literal):
        return
    form = Form(**{key: value for one in forms for key, value in one.items() if value})
    flag = form.flag or f"--{name.strip('_').replace('_', '-')}"
    text = [text, *(note for note in notes if isinstance(note, str))][-1]
    if is_required := default is inspect.Parameter.empty:
        text, default = text if form.is_positional else f"required: {text}", None
    elif default not in (None, False, "", (), 0):
        text += f" ({','.join(default) if isinstance(default, tuple) else default})"
    how: dict[str, Any] = {"help": text.replace("%", "%%"), "dest": name}
    if kind is bool:
        p.add_argument(flag, action="store_true", **how)
        return
    is_many = get_origin(kind) is tuple and not form.is_list
    how |= {"default": default} | ({"metavar": form.metavar} if form.metavar else {})
    if get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    else:
        how["type"] = reader(form.read or (get_args(kind)[0] if is_many else kind))
    how |= {"action": Join} if form.is_list else {}
    if form.is_positional:
        how["nargs"] = form.nargs or ("+" if is_many else None if is_required else "?")
        p.add_argument(how.pop("dest"), **how)
        return
    how |= {"nargs": "+", "action": "extend"} if is_many else {}
    how |= {"nargs": "?", "const": form.alone} if form.alone is not None else {}
    p.add_argument(flag, required=is_required, **how)


def _taken_apart(hint: Any) -> tuple[Any, list[Any]]:
    """A type without None, and what is noted beside it and beside its parts."""
    if get_origin(hint) is Annotated:
        kind, notes = _taken_apart(hint.__origin__)
        return kind, [*notes, *hint.__metadata__]
    if get_origin(hint) in (Union, UnionType):
        parts = [_taken_apart(part) for part in get_args(hint) if part is not NoneType]
        return parts[0][0], [note for _, notes in parts for note in notes]
    return hint, []


def takes_keys(function: Function) -> bool:
    """Whether the verb takes keys of the configuration: its function has a parameter `line`."""
    return "line" in inspect.signature(function).parameters


def described_parameters(function: Function) -> dict[str, str]:
    """The texts of the parameters in a docstring, without a full stop."""
    _, _, text = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.partition("\n\n")[0], re.MULTILINE)
    texts = {name: " ".join(words.split()).rstrip(".") for name, words in found}
    return {name: text[0].lower() + text[1:] for name, text in texts.items()}


def examples_of(function: Function) -> list[str]:
    """The command lines in its docstring; a test parses each of them as the command does."""
    return re.findall(r"^ *((?:torchrun .*|)narrowgauge .*)", inspect.getdoc(function) or "", re.MULTILINE)


def call(function: Function, options: Line, **more: Any) -> Any:
    """Call a verb's function with the values of its options, and with what it takes of `more`."""
    values, parameters = vars(options) | more, inspect.signature(function).parameters
    given = {name: value for name, value in values.items() if name in parameters}
    return function(
        **given, **{name: values[name] for name in keywords_of(function) if values[name] is not None}
    )

"""The verbs of the command, where the function of each is and what it needs; and the parser of their lines.

A function's docstring is the help of its verb, and each parameter is an option: it is declared once. Its type
gives the form of its value (`laboratory.arguments`), its default is that of the option, and its help is the
text beside the type, or the docstring's under `Args:`. A `bool` is a switch. What has another type (a
console, a function) is not for the command line. A function with a `line` takes keys of the configuration: of
its parameters only annotated ones are options, because the others are keys as well.

The modules of verbs import nothing heavy, so that help and usage errors appear at once. The parser finds
options by their other names, and its errors are one sentence. The help of a verb fits on one screen; `--help
all` and `--help SECTION` list the keys of the configuration.
"""

import argparse
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, Unpack, get_args, get_origin, get_type_hints

from narrowgauge.system.errors import UserError, nearest, unknown
from narrowgauge.system.result import Result
from narrowgauge.trainer import data, training  # each name is imported on first use
from narrowgauge.trainer.laboratory.arguments import Form, Line, config_values
from narrowgauge.trainer.training.config.synonyms import SHORT, key_of, other_names, plain, unknown_key

Function = Callable[..., Any]
#: The module of each verb's function, in the groups and the order of the help.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "plan": {
        "advise": "trainer.laboratory.advise.advise",
        "plan": "trainer.laboratory.plan",
        "predict": "trainer.cli.verbs.recipes",
        "doctor": "trainer.cli.verbs.machine",
    },
    "data and models": dict.fromkeys(
        ("prepare", "import", "export", "served", "sample", "eval"), "trainer.cli.verbs.models"
    ),
    "train": {
        "train": "trainer.laboratory.train",
        "compare": "trainer.laboratory.compare",
        "launch": "trainer.cli.verbs.launch",
    },
    "look": {
        **dict.fromkeys(("watch", "report", "runs"), "trainer.cli.verbs.runs"),
        "probe": "trainer.laboratory.probe",
        "sensitivity": "trainer.laboratory.sensitivity",
        "search": "trainer.laboratory.search",
    },
    "measure this machine": dict.fromkeys(("bench", "scaling"), "trainer.cli.verbs.machine"),
    "what exists": dict.fromkeys(("recipes", "formats", "models"), "trainer.cli.verbs.recipes"),
}
VERBS: Mapping[str, str] = {verb: module for verbs in GROUPS.values() for verb, module in verbs.items()}
#: The verbs that need neither the file locks nor the signals of POSIX.
ANYWHERE = ("doctor", "predict", "recipes", "formats", "models", "runs")
#: The verbs that need no torch; `recipes` does for questions about this machine.
WITHOUT_TORCH = (*ANYWHERE, "prepare", "report", "watch")


def function_of(verb: str) -> Function:
    """The function of a verb."""
    module = import_module(f"narrowgauge.{VERBS[verb]}")
    function: Function = getattr(module, f"{verb}_" if verb in ("import", "eval") else verb)
    return function


def title_of(verb: str) -> str:
    """What a verb does, in a sentence: the first line of its function's docstring."""
    return (inspect.getdoc(function_of(verb)) or "").partition("\n")[0]


def examples_of(function: Function) -> list[str]:
    """The command lines in its docstring; a test parses each of them as the command does."""
    return re.findall(r"^ *((?:torchrun .*|)narrowgauge .*)", inspect.getdoc(function) or "", re.MULTILINE)


def takes_keys(function: Function) -> bool:
    """Whether the verb takes keys of the configuration: its function has a parameter `line`."""
    return "line" in inspect.signature(function).parameters


def parameters_of(function: Function) -> dict[str, tuple[Any, Any]]:
    """The type and default of each parameter; of keywords that functions share as a TypedDict, of each."""
    found: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if get_origin(hint := hints[name]) is Unpack:
            shared = get_type_hints(get_args(hint)[0], include_extras=True)
            found |= {keyword: (one, None) for keyword, one in shared.items()}
        else:
            found[name] = hint, parameter.default
    return found


def call(function: Function, options: Line, **more: Any) -> Any:
    """Call a verb's function with the values of its options, and with what it takes of `more`.

    A shared keyword that is not on the line is left out, because its default is that of the function.
    """
    values, own = vars(options) | more, inspect.signature(function).parameters
    given = [name for name in parameters_of(function) if name in own or values.get(name) is not None]
    return function(**{name: values[name] for name in given if name in values})


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
    _, _, text = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    texts = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.partition("\n\n")[0], re.MULTILINE)
    described = {name: " ".join(words.split()).rstrip(".") for name, words in texts}
    keys, hints = takes_keys(function), parameters_of(function)
    for name, (hint, default) in hints.items():
        if not keys or get_origin(hint) is Annotated:  # of which some are parameters of Python as well
            words = described.get(name, "")
            _add(p, name, hint, default, words[:1].lower() + words[1:])
    answer = get_type_hints(function).get("return")
    if isinstance(answer, type) and issubclass(answer, Result) and "console" not in hints:
        p.add_argument("--json", action="store_true", help="print JSON")


def _add(p: argparse.ArgumentParser, name: str, hint: Any, default: Any, text: str) -> None:
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
    how |= {"nargs": "?", "const": form.bare} if form.bare is not None else {}
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


COLUMN = 34  # where the second column begins


def command_text() -> str:
    """The help of the command: groups of verbs, each with what it does."""
    lines = ["usage: narrowgauge [-h] [-V] VERB ...", ""]
    lines += ["Pre-train language models in low precision, and see what each format did."]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:"]
        for verb in verbs:
            text = title_of(verb)
            lines += _row(f"    {verb}", text[0].lower() + text[1:].rstrip("."), 18)
    lines += ["", "options:", *_row("  -h, --help", "show this help message and exit", 18)]
    lines += _row("  -V, --version", "show the version and exit", 18)
    return "\n".join(
        [*lines, "", "'narrowgauge VERB --help' explains a verb; 'narrowgauge doctor' checks this machine."]
    )


def sections_text() -> str:
    """The sections with the names of their keys."""
    lines = [
        "",
        "keys of the configuration, as --SECTION.KEY, or --KEY if it is unique (--lr X):",
    ]
    for section, keys in _sections().items():
        lines += _row(f"  --{section}.*", _listed(key.partition(".")[2] for key in keys), 18)
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    """Names separated by commas, with common prefixes factored out: `fprop.{x,w}`."""
    endings: dict[str, list[str]] = {}
    for name in names:
        place, _, operand = name.rpartition(".")
        endings.setdefault(place or name, []).extend([operand] if place else [])
    return ", ".join(f"{name}.{{{','.join(last)}}}" if last else name for name, last in endings.items())


def keys_text(topic: str) -> str:
    """Each key of a section, or of all sections: its values, meaning and default."""
    sections = _sections()
    if topic not in ("all", *sections):
        raise unknown("section", topic, (*sections, "all"))
    lines: list[str] = []
    for section in sections if topic == "all" else (topic,):
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for name, key in sections[section].items():
            lines += _row(f"  --{name} {key.metavar}", str(key), COLUMN + 6)
    return "\n".join(lines) + "\n"


def _sections() -> "dict[str, dict[str, training.Key]]":
    sections: dict[str, dict[str, training.Key]] = {}
    for name, key in training.config_keys().items():
        sections.setdefault(name.partition(".")[0], {})[name] = key
    return sections


def _row(left: str, right: str, column: int) -> list[str]:
    """Two columns; the second moves to the next line if the first is too long."""
    width, indent = shutil.get_terminal_size().columns - 2, " " * column
    text = textwrap.wrap(right, max(width, column + 20), initial_indent=indent, subsequent_indent=indent)
    if len(left) > column - 2:
        return [left, *text]
    return [left.ljust(column) + text[0].lstrip(), *text[1:]]


_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)[\w.+-]*\Z")  # also -1e-3, which argparse takes for an option
_LONG_WITH_ONE_DASH = re.compile(r"-[a-z][\w-]+")


class Parser(argparse.ArgumentParser):
    """The parser of a verb.

    Attributes:
        names: The keys that options may mean by another name (`synonyms`); empty for a verb without keys.
    """

    def __init__(self, verb: str) -> None:
        """Make the parser of a verb."""
        super().__init__(
            f"narrowgauge {verb}", description=title_of(verb), allow_abbrev=False, add_help=False
        )
        self.verb, function = verb, function_of(verb)
        self.examples = examples_of(function)
        self.names: Mapping[str, training.Key] = {}
        self._negative_number_matcher = _NEGATIVE
        self.help_option = self.add_argument("-h", "--help", action="store_true", help="show this and exit")
        self.set_defaults(verb=verb)
        add_options(self, function)
        if takes_keys(function):
            self._take_keys()

    def _take_keys(self) -> None:
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
        if "--out" not in self._option_string_actions:
            self.add_argument("--out", type=reader(Path), metavar="DIR", help="the run directory")
        for short, name in SHORT.items():
            text = str(keys[name]).replace("%", "%%")
            self.add_argument(f"--{short}", dest=name, metavar=keys[name].metavar, help=text)
        for name, key in keys.items():
            how: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            how |= {"action": Join} if key.metavar.endswith(",...") else {}
            how |= {"nargs": "?", "const": "true"} if key.metavar.startswith("true|false") else {}
            self.add_argument(f"--{name}", dest=name, metavar=key.metavar, **how)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in the words after the verb; ends with the help if that is asked for."""
        own = list(takewhile(lambda word: word != "--", words))
        if asked := {"-h", "--help"} & {*own}:
            topic = words[words.index(asked.pop()) + 1 :][:1]
            has_topic = self.names and topic and not topic[0].startswith("-")
            print(keys_text(topic[0]) if has_topic else self.format_help(), end="", flush=True)
            sys.exit()
        if self.verb != "launch":  # which takes the words of another line
            words = [*map(self._named, own), *words[len(own) :]]
        options, rest = self.parse_known_args(words)
        if rest:
            raise self.unknown_argument(rest[0])
        return options

    def _named(self, word: str) -> str:
        """The word, with another name of an option replaced by its canonical name."""
        if _LONG_WITH_ONE_DASH.fullmatch(word):  # argparse would parse -help as -h with elp
            raise self.unknown_argument(word)
        name, equals, value = word.partition("=")
        options = self._option_string_actions
        if not name.startswith("--") or " " in name or name == "--" or name in options:
            return word
        own = plain(name[2:])
        ways = [f"--{own}"]
        with suppress(ImportError):  # of pydantic, for which the doctor has an answer
            aliased = (key for key, known in training.config_keys().items() if known.alias == own)
            ways += [f"--{plain(key.rpartition('.')[2])}" for key in aliased]
        named = next((way for way in ways if way in options), None)
        if named is None and self.names:
            named = f"--{key_of(name[2:], self.names) or name[2:]}"
        if named not in options:
            raise self.unknown_argument(word)
        return f"{named}{equals}{value}"

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
        parsers = {verb: parser_of(verb) for verb in VERBS}
        verbs = [verb for verb, p in parsers.items() if name in p._option_string_actions] or [
            verb for verb, p in parsers.items() if plain(name[2:]) in other_names(p.names)
        ]
        if verbs:
            *first, last = verbs
            have = f"{', '.join(first)} and {last} have" if first else f"{last} has"
            return UserError(f"unknown option {name!r}; {have} it, {self.verb} does not")
        others = (f"--{other}" for other in other_names(self.names) if len(other) > 3)  # not --dy
        known = [*self._option_string_actions, *others]
        error = unknown("option", name, known)
        return error if nearest(name, known) else UserError(f"{error}; see '{self.prog} --help'")


OF_THE_COMMAND = ("-h", "--help", "-V", "--version")  # options without a verb


def read_line(words: list[str]) -> argparse.Namespace:
    """Parse a command line that begins with a verb."""
    check_verb(words)
    options = parser_of(words[0]).read(words[1:])
    options.command_line = words
    return options


def check_verb(words: list[str]) -> None:
    """Refuse a command line whose first word is not a verb."""
    if not words or words[0] in VERBS or words[0] in OF_THE_COMMAND:
        return
    first = words[0]
    if not first.startswith("-"):
        raise unknown("verb", first, VERBS)
    if near := nearest(first, OF_THE_COMMAND):
        raise UserError(f"unknown option {first!r}; the nearest is {near!r}")
    raise UserError(
        f"unknown option {first!r}; a verb comes first, as in narrowgauge train {first}; see "
        "'narrowgauge --help'"
    )


parser_of = cache(Parser)  # one for each verb


def require_sources(options: argparse.Namespace) -> None:
    """Refuse a source of data that is not there, before torch is imported; others read none."""
    if options.verb in ("plan", "advise", "bench", "doctor"):
        return
    has_keys = hasattr(options, "config")
    source = config_values(options).get("data", {}).get("source") if has_keys else vars(options).get("data")
    if isinstance(source, str) and (absent := data.why_absent(source)):
        raise UserError(absent)

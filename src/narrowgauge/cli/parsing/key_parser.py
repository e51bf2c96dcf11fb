"""A parser of command lines with keys of the configuration, each known by several names, and its help.

The help of a verb fits on one screen; `--help all` and `--help SECTION` list the keys.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from narrowgauge import training  # each name is imported on first use, and this one needs pydantic
from narrowgauge.cli.parsing.parser import Parser
from narrowgauge.errors import UserError, unknown
from narrowgauge.training.config.synonyms import key_of, other_names, plain, unknown_key

ALL = "all"
COLUMN = 34  # where the second column begins

#: Example command lines; a test parses each of them as the command does.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "train": (
        "narrowgauge train my.toml --steps 2000 --lr 1e-3 --out runs/mine",
        "narrowgauge train --model gpt2-124m --data my-texts/ --recipe nvfp4 --seq-len 1024",
        "narrowgauge train --recipe mxfp4 --recipe.fprop.x '{cast = \"fp4-row\", outliers = 0.99}'",
        "torchrun --standalone --nproc-per-node 2 -m narrowgauge train --parallel.tensor 2",
    ),
    "compare": (
        "narrowgauge compare --recipes bf16,fp8,mxfp4 --seeds 3 --steps 200",
        "narrowgauge compare --variant wide:recipe=bf16 --variant hot:recipe=fp8,lr=4e-3",
    ),
    "plan": (
        "narrowgauge plan --model llama3-1b --recipe msamp-o2 --memory-limit 24GB",
        "narrowgauge plan my.toml --cluster h100 --devices 64 --tokens 300B",
    ),
    "advise": (
        "narrowgauge advise --model gpt2-124m --cluster rtx4090",
        "narrowgauge advise --model llama3-8b --cluster b200 --devices 8 --tokens 100B",
    ),
    "predict": ("narrowgauge predict --recipe mxfp8,nvfp4 --params 8e9 --tokens 1T",),
    "prepare": ("narrowgauge prepare my-texts/ --out data/mine --tokenizer bpe-4096",),
    "sample": ("narrowgauge sample runs/mine --prompt 'def main'",),
    "eval": ("narrowgauge eval runs/mine --task val --batches 8",),
    "export": (
        "narrowgauge export runs/mine --to hf --out exported",
        "narrowgauge export runs/mine --to compressed-tensors --calibrate text.txt --out served",
    ),
    "import": (
        "narrowgauge import gpt2/ --out runs/gpt2",
        "narrowgauge import model.gguf --out runs/theirs --data text.txt",
    ),
    "served": ("narrowgauge served runs/mine --with llama.cpp",),
    "probe": ("narrowgauge probe runs/mine --recipes mxfp8,nvfp4",),
    "sensitivity": ("narrowgauge sensitivity runs/mine --to mxfp4",),
    "search": ("narrowgauge search runs/mine --formats mxfp4,mxfp8,bf16 --budget 0.5 --out found.toml",),
    "launch": ("narrowgauge launch --torchrun --gpus-per-node 8 --out run.sh -- train my.toml",),
    "watch": (
        "narrowgauge watch runs/mine",
        "narrowgauge watch runs/",
        "narrowgauge watch runs/compare-debug --once --out compared.html",
    ),
    "report": ("narrowgauge report runs/mine runs/other --out both.html",),
    "recipes": ("narrowgauge recipes nvfp4 --diff mxfp4",),
    "formats": ("narrowgauge formats e4m3",),
    "models": ("narrowgauge models llama3-8b",),
    "runs": ("narrowgauge runs runs/",),
    "bench": ("narrowgauge bench --model gpt2-debug --recipe fp8 --peers none",),
    "scaling": ("narrowgauge scaling --procs 1,2 --device cpu --seconds 5",),
}
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


def sections_text() -> str:
    """The sections with the names of their keys."""
    width = _width()
    lines = [
        "",
        "keys of the configuration, as --SECTION.KEY, or --KEY if it is unique (--lr X):",
    ]
    for section, keys in _sections().items():
        lines += _row(f"  --{section}.*", _listed(key.partition(".")[2] for key in keys), 18, width)
    return "\n".join(lines) + "\n"


def examples_text(verb: str) -> str:
    """Lines of a verb: the end of its help."""
    lines = [f"  {line}" for line in EXAMPLES.get(verb, ())]
    return "\n".join(["", "examples:", *lines]) + "\n" if lines else ""


def _listed(names: Iterable[str]) -> str:
    """Names separated by commas, with common prefixes factored out: `fprop.{x,w}`."""
    endings: dict[str, list[str]] = {}
    for name in names:
        place, _, operand = name.rpartition(".")
        endings.setdefault(place or name, []).extend([operand] if place else [])
    return ", ".join(f"{name}.{{{','.join(last)}}}" if last else name for name, last in endings.items())


def keys_text(topic: str) -> str:
    """Each key of a section, or of all sections: its values, meaning and default.

    Raises:
        UserError: There is no such section.
    """
    sections = _sections()
    if topic not in (ALL, *sections):
        raise unknown("section", topic, (*sections, ALL))
    lines: list[str] = []
    for section in sections if topic == ALL else (topic,):
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for name, key in sections[section].items():
            lines += _row(f"  --{name} {key.takes}", str(key), COLUMN + 6, _width())
    return "\n".join(lines) + "\n"


def _sections() -> "dict[str, dict[str, training.Key]]":
    sections: dict[str, dict[str, training.Key]] = {}
    for name, key in training.config_keys().items():
        sections.setdefault(name.partition(".")[0], {})[name] = key
    return sections


def _width() -> int:
    return shutil.get_terminal_size().columns - 2


def _row(left: str, right: str, column: int, width: int) -> list[str]:
    """Two columns; the second moves to the next line if the first is too long."""
    indent = " " * column
    text = textwrap.wrap(right, max(width, column + 20), initial_indent=indent, subsequent_indent=indent)
    if len(left) > column - 2:
        return [left, *text]
    return [left.ljust(column) + text[0].lstrip(), *text[1:]]


class KeyParser(Parser):
    """A parser that also finds the keys of the configuration by their other names.

    Attributes:
        names: The keys that options may mean by another name (`synonyms`); empty for a verb without keys.
        verbs_with: Finds the verbs that have an option.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self._negative_number_matcher = _NEGATIVE
        self.names: Mapping[str, training.Key] = {}
        self.verbs_with: Callable[[str], Sequence[str]] = lambda option: ()
        self.help_option = HelpAction(("-h", "--help"), "help", help="show this and exit")
        self._add_action(self.help_option)

    def take_keys(self) -> None:
        """Find options by the other names of the configuration's keys; list the keys with `--help all`."""
        self.names = training.config_keys() | {"out": training.Key("", "", "DIR", "output-dir")}
        self.usage = "%(prog)s [CONFIG.toml] [OPTION VALUE ...]"
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=COLUMN)
        self.help_option.take_topic()

    def mark_required(self) -> None:
        """Begin the help of each option that a line has to have with the word."""
        for action in self._actions:
            if action.option_strings and action.required:
                action.help = f"required: {action.help}" if action.help else "required"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, with each option under its canonical name."""
        return super().parse_known_args([self._named(word) for word in args or ()], namespace)

    def _named(self, word: str) -> str:
        """The word, with another name of an option replaced by its canonical name."""
        if _LONG_WITH_ONE_DASH.fullmatch(word):  # argparse would parse -help as -h with elp
            raise self.unknown_argument(word)
        name, equals, value = word.partition("=")
        options = self._option_string_actions
        if not name.startswith("--") or " " in name or name == "--" or name in options:
            return word
        own = plain(name[2:])
        aliased = (key for key, known in training.config_keys().items() if known.alias == own)
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
        verb = self.prog.split()[-1]
        return super().format_help() + (sections_text() if self.names else "") + examples_text(verb)

    def unknown_argument(self, argument: str) -> UserError:
        """The error for an argument that no option takes: the verbs that have it, or the nearest option."""
        if argument.endswith(("}", ",")) or argument.startswith("{"):
            return UserError(
                f"{argument!r} is part of a table that the shell has split at its spaces; put the table in "
                "single quotes, as in --recipe.fprop.x '{cast = \"fp4-row\", outliers = 0.99}'"
            )
        name = argument.split("=")[0]
        if not argument.startswith("-"):
            return super().unknown_argument(argument)
        if "." in name and self.names:
            return unknown_key(name.lstrip("-"), self.names, "--")
        if verbs := self.verbs_with(name):
            *first, last = verbs
            have = f"{', '.join(first)} and {last} have" if first else f"{last} has"
            return UserError(f"unknown option {name!r}; {have} it, {self.prog.split()[-1]} does not")
        others = (f"--{other}" for other in other_names(self.names) if len(other) > 3)  # not --dy
        return self.unknown_option(name, [*self._option_string_actions, *others])

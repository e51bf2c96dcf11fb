"""Help of verbs that take a configuration: one screen, by `--help all` or `--help SECTION` its keys."""

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowgauge import training  # each name is imported when it is used, and this one takes pydantic
from narrowgauge.errors import unknown

ALL = "all"
COLUMN = 34  # where the second column begins

#: Lines that a reader may try; a test reads each as the command does.
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
    "bench": ("narrowgauge bench --model gpt2-debug --recipe fp8 --peers none",),
    "scaling": ("narrowgauge scaling --procs 1,2 --device cpu --seconds 5",),
}


class HelpAction(argparse.Action):
    """Print the help of a verb and end; with a topic, the keys of one section or of all."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def take_topic(self) -> None:
        """Let the option take a topic."""
        self.nargs, self.metavar = "?", "all|SECTION"
        self.help = "show this and end; all: every key; SECTION: the keys of one"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print what was asked for."""
        print(keys_text(values) if isinstance(values, str) else parser.format_help(), end="")
        parser.exit()


def sections_text(verb: str) -> str:
    """The sections with the names of their keys, and lines to try: the end of a verb's help."""
    width = _width()
    lines = [
        "",
        "keys of the configuration, as --SECTION.KEY, or --KEY where one section alone has it (--lr X):",
    ]
    for section, keys in _sections().items():
        lines += _row(f"  --{section}.*", _listed(key.partition(".")[2] for key in keys), 18, width)
    if verb in EXAMPLES:
        lines += ["", "examples:", *(f"  {line}" for line in EXAMPLES[verb])]
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    """Names with commas between; those with one beginning as it: `fprop.{x,w}`."""
    endings: dict[str, list[str]] = {}
    for name in names:
        place, _, operand = name.rpartition(".")
        endings.setdefault(place or name, []).extend([operand] if place else [])
    return ", ".join(f"{name}.{{{','.join(last)}}}" if last else name for name, last in endings.items())


def keys_text(topic: str) -> str:
    """Each key of a section, or of all sections: what it takes, what it means, its default.

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
    """Two columns; the second begins on a line of its own where the first is too long."""
    indent = " " * column
    text = textwrap.wrap(right, max(width, column + 20), initial_indent=indent, subsequent_indent=indent)
    if len(left) > column - 2:
        return [left, *text]
    return [left.ljust(column) + text[0].lstrip(), *text[1:]]

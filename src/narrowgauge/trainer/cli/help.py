"""The texts of help: the verbs in groups, and the keys of the configuration."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping

from narrowgauge.system.errors import unknown
from narrowgauge.trainer import training  # each name is imported on first use

ALL = "all"
COLUMN = 34  # where the second column begins


def command_text(groups: Mapping[str, Mapping[str, str]]) -> str:
    """The help of the command: groups of verbs, each with what it does."""
    lines = ["usage: narrowgauge [-h] [-V] VERB ...", ""]
    lines += ["Pre-train language models in low precision, and see what each format did."]
    for group, verbs in groups.items():
        lines += ["", f"{group}:"]
        for name, text in verbs.items():
            lines += _row(f"    {name}", text[0].lower() + text[1:].rstrip("."), 18)
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
    """Each key of a section, or of all sections: its values, meaning and default.

    Raises:
        UserError: The section does not exist.
    """
    sections = _sections()
    if topic not in (ALL, *sections):
        raise unknown("section", topic, (*sections, ALL))
    lines: list[str] = []
    for section in sections if topic == ALL else (topic,):
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for name, key in sections[section].items():
            lines += _row(f"  --{name} {key.takes}", str(key), COLUMN + 6)
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

"""The command: runs a command line, importing as little as possible.

Help, usage errors and the tables of what exists do not need torch: a verb imports it after its command line
has been parsed. If torch is missing or cannot be imported, the message gives the reason and the fix.
"""

import inspect
import io
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import narrowgauge
from narrowgauge.system.operating_system import require_posix
from narrowgauge.system.result import Result
from narrowgauge.trainer.cli import signature
from narrowgauge.trainer.cli.ending import to_the_end
from narrowgauge.trainer.cli.help import command_text
from narrowgauge.trainer.cli.installed import NotInstalled, missing, require_torch, too_old
from narrowgauge.trainer.cli.line import check_verb, read_line, require_sources
from narrowgauge.trainer.cli.table import ANYWHERE, GROUPS, VERBS, WITHOUT_TORCH, function_of
from narrowgauge.trainer.cluster.doctor.facts import LIMITS
from narrowgauge.trainer.cluster.doctor.software import folder_of
from narrowgauge.trainer.laboratory.arguments import Line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    warnings.formatwarning = lambda message, *_, **__: f"narrowgauge: warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):  # a character that a terminal lacks ends no run
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")
    return to_the_end(lambda: _run(words))


def _run(words: list[str]) -> int | None:
    """Run a command line.

    Raises:
        UserError: The line has a mistake, or the verb needs another operating system.
        NotInstalled: torch, or another package, does not import.
    """
    check_verb(words)
    if not words or words[0] not in VERBS:
        if words and words[0] in ("-V", "--version"):
            print(f"narrowgauge {narrowgauge.__version__}")
        else:
            print(command_text({g: {v: _title(v) for v in verbs} for g, verbs in GROUPS.items()}))
        return None
    verb = words[0]
    if verb not in ANYWHERE:
        require_posix(verb)
    needed = ["rich"] if verb == "doctor" else [name for name in LIMITS["packages"] if name != "torch"]
    if absent := [name for name in needed if folder_of(name) is None]:
        if {"-h", "--help"} & set(words):
            print(f"usage: narrowgauge {verb} ...\n\n{_title(verb)}")
        raise missing(absent)
    options = read_line(words)
    require_sources(options)
    return run_verb(options)


def _title(verb: str) -> str:
    return signature.title_of(function_of(verb))


def run_verb(options: Line) -> int | None:
    """Run the verb of a line, and print what it found; returns the exit code.

    Raises:
        NotInstalled: torch does not import, or lacks a name.
    """
    from rich.console import Console

    from narrowgauge.trainer.cli.progress import progress

    function = function_of(options.verb)
    as_json = getattr(options, "json", False) is True
    if options.verb not in WITHOUT_TORCH:
        with Console(stderr=True).status("starting ..."):  # on a terminal; torch takes seconds to import
            require_torch()
    bars = progress(Console(stderr=as_json), options.verb)
    try:
        with bars if "show" in inspect.signature(function).parameters else nullcontext() as show:
            console = Console(stderr=as_json)
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            more = {"line": options, "show": show, "console": console, "say": say}
            found = signature.call(function, options, **more)
    except (ImportError, AttributeError):  # caused by a name that this torch does not have
        if sentence := too_old():
            raise NotInstalled(sentence) from None
        raise
    if not isinstance(found, Result):
        return None if found is None else int(found)
    if "console" in inspect.signature(function).parameters:  # it has printed what it found
        return int(getattr(found, "has_failed", False))
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        found.show(Console())
    return int(getattr(found, "has_failed", False))

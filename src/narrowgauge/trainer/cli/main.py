"""The command: runs a command line, importing as little as possible, and ends with an exit code.

Help, usage errors and the tables of what exists do not need torch: a verb imports it after its command line
has been parsed. If torch is missing or cannot be imported, the message gives the reason and the fix.

Exit codes: 0 done, 2 wrong usage or input, 75 preempted after a save, 1 any other failure. A user's mistake
is one sentence on standard error, without a traceback.
"""

import inspect
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import narrowgauge
from narrowgauge.system.errors import EXIT_FAILED, EXIT_PREEMPTED, Failed, ProcessFailed, UserError
from narrowgauge.system.operating_system import require_posix
from narrowgauge.system.result import Result
from narrowgauge.system.signals import Preempted, StoppedEarly
from narrowgauge.trainer.cli.line import (
    ANYWHERE,
    VERBS,
    WITHOUT_TORCH,
    call,
    check_verb,
    command_text,
    function_of,
    read_line,
    require_sources,
    title_of,
)
from narrowgauge.trainer.cluster.doctor.facts import LIMITS, dotted, folder_of, release
from narrowgauge.trainer.cluster.doctor.torch_setup import fix_of, is_absent, words_of_import
from narrowgauge.trainer.distributed import reports_for_all
from narrowgauge.trainer.laboratory.arguments import Line, Progress

if TYPE_CHECKING:
    from rich.console import Console

_MORE = "'narrowgauge doctor' looks at the whole machine"


class NotInstalled(UserError):
    """A package that the verb needs cannot be imported: exit code 1."""

    exit_code = 1


def to_the_end(action: Callable[[], int | None]) -> int:
    """Do the work of a command line; returns the exit code."""
    try:
        code = action() or 0
        print(end="", flush=True)  # there may be no standard output
    except (Preempted, StoppedEarly) as stop:
        return end_for_all(stop, f"stopped by {stop}", EXIT_PREEMPTED)
    except ProcessFailed as error:
        return error.code if error.code > 0 else end_for_all(error, str(error), EXIT_FAILED)
    except Failed as failure:
        return end(with_notes(failure), failure.code) if failure.is_printed else failure.code
    except UserError as error:
        return end_for_all(error, str(error), error.exit_code)
    except KeyboardInterrupt:
        return end("interrupted", EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output went away, as in `narrowgauge recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return EXIT_FAILED
    except OSError as error:  # a full disk, a file system that went away
        return end(with_notes(error), EXIT_FAILED)
    return code


def end(sentence: str, code: int) -> int:
    """Print a sentence on standard error; returns the exit code."""
    print(f"narrowgauge: {sentence}", file=sys.stderr)
    return code


def end_for_all(error: BaseException, sentence: str, code: int) -> int:
    """End every process with the same code; one of them prints, or the rank that a note names."""
    return end(sentence, code) if _notes(error) or reports_for_all(os.environ) else code


def with_notes(error: BaseException) -> str:
    """An error's sentence with its notes: the rank, the loader's thread."""
    return "; ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    warnings.formatwarning = lambda message, *_, **__: f"narrowgauge: warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):  # a character that a terminal lacks ends no run
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")
    return to_the_end(lambda: _run(words))


def _run(words: list[str]) -> int | None:
    """Run a command line."""
    check_verb(words)
    if not words or words[0] not in VERBS:
        if words and words[0] in ("-V", "--version"):
            print(f"narrowgauge {narrowgauge.__version__}")
        else:
            print(command_text())
        return None
    verb = words[0]
    if verb not in ANYWHERE:
        require_posix(verb)
    needed = ["rich"] if verb == "doctor" else [name for name in LIMITS["packages"] if name != "torch"]
    if absent := [name for name in needed if folder_of(name) is None]:
        if {"-h", "--help"} & set(words):
            print(f"usage: narrowgauge {verb} ...\n\n{title_of(verb)}")
        packages = f"the packages {', '.join(absent)} are" if absent[1:] else f"the package {absent[0]} is"
        raise NotInstalled(f"{packages} missing; python -m pip install {' '.join(absent)}; {_MORE}")
    options = read_line(words)
    require_sources(options)
    return run_verb(options)


def run_verb(options: Line) -> int | None:
    """Run the verb of a line, and print what it found; returns the exit code."""
    from rich.console import Console

    function = function_of(options.verb)
    as_json = getattr(options, "json", False) is True
    if options.verb not in WITHOUT_TORCH:
        with Console(stderr=True).status("starting ..."):  # on a terminal; torch takes seconds to import
            require_torch()
    takes, bars = inspect.signature(function).parameters, _progress(Console(stderr=as_json), options.verb)
    try:
        with bars if "show" in takes else nullcontext() as show:
            console = Console(stderr=as_json)
            say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            found = call(function, options, line=options, show=show, console=console, say=say)
    except (ImportError, AttributeError):  # caused by a name that this torch does not have
        if sentence := too_old():
            raise NotInstalled(sentence) from None
        raise
    if not isinstance(found, Result):
        return None if found is None else int(found)
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    elif "console" not in takes:  # else it has printed what it found
        found.show(Console())
    return int(getattr(found, "has_failed", False))


@contextmanager
def _progress(console: "Console", name: str) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a line when a recipe begins."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(compact=True))
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def show(recipe: str, done: int, total: int) -> None:
            if recipe not in tasks:
                tasks[recipe] = bars.add_task(f"{name} {recipe}", total=total)
                if not console.is_terminal:
                    console.print(f"{name} {recipe} ...", highlight=False, markup=False)
            bars.update(tasks[recipe], completed=done)

        yield show


def require_torch() -> None:
    """Import torch, or say why it cannot be imported."""
    try:
        import torch  # noqa: F401  alone, so that the error is torch's
    except Exception as error:  # anything that a broken installation raises
        words = words_of_import(error)
        why = "torch is not installed" if is_absent(words) else f"torch does not import: {words}"
        raise NotInstalled(f"{why}; {fix_of(words)}; {_MORE}") from error


def too_old() -> str:
    """The message for a torch that lacks what this package needs; "" if it is new enough."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    oldest = LIMITS["version"]["torch"]
    if release(found) >= oldest:
        return ""
    return f"torch {found} is too old; install torch {dotted(oldest)} or later; {_MORE} and names the build"

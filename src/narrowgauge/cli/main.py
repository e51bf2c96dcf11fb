"""The doors: one thin function for each verb of `narrowgauge`.

Exit codes: 0 done, 2 wrong usage or input, 75 preempted after a save, 1 any other failure. A user's mistake
is one sentence on standard error, without a traceback.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge.checkpoint import PoisonedError, SaveError
from narrowgauge.cli import bench, compare, launch, machine, prepare
from narrowgauge.cli.models import add_exchange_verbs
from narrowgauge.cluster import WorldFailed
from narrowgauge.distributed import StoppedByPeer, reports_for_all, world_from
from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import format, format_names
from narrowgauge.recipes import choose_backend, device_facts, recipe, recipe_names
from narrowgauge.report import print_comparison, read_run, write_report
from narrowgauge.report.compare.compare import ComparisonFailed
from narrowgauge.signals import Preempted, StoppedEarly
from narrowgauge.training import (
    PROFILED,
    Config,
    Corrupted,
    Diverged,
    OutOfMemory,
    config_keys,
    convert_run,
    load_values,
    make_config,
    run,
)

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED = 0, 1, 2, 75

# Short options for the obvious keys.
_SHORT = {
    "model": "model.name",
    "data": "data.source",
    "recipe": "recipe.name",
    "backend": "recipe.backend",
    "steps": "training.steps",
    "seed": "training.seed",
    "device": "training.device",
    "memory-limit": "training.memory_limit",
}


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence that names the nearest option."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see '{self.prog} --help'")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # where the help that nobody reads any more can still be caught
        super().exit(status, message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    try:
        options = _options(sys.argv[1:] if arguments is None else list(arguments))
        action: Callable[[argparse.Namespace], int | None] = options.action
        code = action(options) or EXIT_DONE
        sys.stdout.flush()
    except (Preempted, StoppedEarly) as stop:
        return _ended_alike(stop, f"stopped by {stop}", EXIT_PREEMPTED)
    except StoppedByPeer as stop:  # another rank has said why
        return _ended(str(stop), stop.code) if stop.speaks else stop.code
    except (ComparisonFailed, WorldFailed) as error:
        # A run that ended by itself has said why.
        return error.code if error.code > 0 else _ended_alike(error, str(error), EXIT_FAILED)
    except (Corrupted, Diverged, OutOfMemory, PoisonedError, SaveError) as error:
        return _ended(_with_notes(error), EXIT_FAILED)
    except UserError as error:
        return _ended_alike(error, str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _ended("interrupted", EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output went away, as in `narrowgauge recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return EXIT_FAILED
    except OSError as error:  # a full disk, a file system that went away
        return _ended(_with_notes(error), EXIT_FAILED)
    return code


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _with_notes(error: BaseException) -> str:
    """An error's sentence and what it says of the place: the rank, the loader's thread."""
    return "; ".join([str(error), *_notes(error)])


def _ended_alike(error: BaseException, sentence: str, code: int) -> int:
    """The end of all processes of a job, told by one; or of the rank that a note names."""
    return _ended(sentence, code) if _notes(error) or reports_for_all(os.environ) else code


def _ended(sentence: str, code: int) -> int:
    print(f"narrowgauge: {sentence}", file=sys.stderr)
    return code


def _options(arguments: list[str]) -> argparse.Namespace:
    parser, verbs = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        raise unknown("verb", arguments[0], verbs)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        raise _unknown_argument(rest[0], options.parser)
    return options


def _parser() -> tuple[_Parser, list[str]]:
    """The parser of the whole line, and the names of the verbs."""
    parser = _Parser(
        prog="narrowgauge",
        description="Pre-train language models in narrow numbers, and see what the numbers did.",
        epilog="'narrowgauge VERB --help' explains each verb.",
        allow_abbrev=False,
    )
    parser.set_defaults(action=lambda options: parser.print_help(), parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", parser_class=_Parser)

    def verb(name: str, help: str, action: Callable[[argparse.Namespace], int | None]) -> _Parser:
        p = verbs.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False
        )
        p.set_defaults(action=action, parser=p)
        return p

    p = verb("train", "train a model; the same line again continues a run that stopped", _train)
    p.add_argument(
        "--allow-change",
        metavar="KEY[,KEY]",
        default="",
        help="section.keys that may have other values than the run in --out began with",
    )
    p.add_argument(
        "--profile",
        metavar="STEPS",
        nargs="?",
        type=_count,
        const=PROFILED,
        default=0,
        help=f"record STEPS steps ({PROFILED}): a trace for Perfetto in DIR/profile, and the time by class",
    )
    _add_config_options(p)
    p = verb("compare", compare.HELP, compare.run)
    compare.add_options(p, _values, _SHORT)
    _add_config_options(p)
    p = verb("plan", machine.PLAN_HELP, _plan)
    machine.add_plan_options(p)
    _add_config_options(p)
    p = verb("bench", bench.HELP, lambda options: bench.run(options, make_config(_values(options))))
    bench.add_options(p)
    _add_config_options(p)
    machine.add_options(verb("doctor", machine.HELP, machine.run))
    p = verb("scaling", machine.SCALING_HELP, _scaling)
    machine.add_scaling_options(p)
    _add_config_options(p)
    p = verb("convert", "a run's newest state under another recipe, in a new run directory", _convert)
    p.add_argument("run", metavar="RUN", type=Path)
    p.add_argument("--recipe", required=True, metavar="R", help="a shipped recipe or a .toml file")
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new run directory")
    prepare.add_options(verb("prepare", "turn documents into token files", prepare.run))
    add_exchange_verbs(verb)
    p = verb("launch", "write the script that starts a run on a cluster", launch.run)
    launch.add_options(p, _read_train)
    p = verb("report", "(re)make the HTML report of one run or several", _report)
    p.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    p.add_argument("--out", type=Path, help="the page (report.html in the first RUN)")
    p = verb("recipes", "the recipes that ship, or the TOML of one", _recipes)
    p.add_argument("name", metavar="NAME", nargs="?")
    p = verb("formats", "the number formats, or the facts of one", _formats)
    p.add_argument("name", metavar="NAME", nargs="?")
    return parser, list(verbs.choices)


def _add_config_options(p: _Parser) -> None:
    p.add_argument("config", metavar="CONFIG.toml", type=Path, nargs="?", help="configuration file")
    p.add_argument("--out", type=Path, metavar="DIR", help="the run directory")
    for short, key in _SHORT.items():
        p.add_argument(f"--{short}", dest=key, metavar="VALUE", help=f"short for --{key}")
    group = p.add_argument_group("any key of the configuration")
    for key, description in config_keys().items():
        text = description.replace("%", "%%")
        group.add_argument(f"--{key}", dest=key, metavar="VALUE", help=text, default=argparse.SUPPRESS)


def _count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> UserError:
    known = [option for action in parser._actions for option in action.option_strings]
    return unknown("option" if argument.startswith("-") else "argument", argument.split("=")[0], known)


def _values(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The nested values of the TOML file, with those of the command line over them."""
    values: dict[str, dict[str, Any]] = load_values(options.config) if options.config else {}
    for key, value in vars(options).items():
        if "." in key and value is not None:
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
    return values


def _read_train(words: list[str]) -> tuple[Config, Path | None]:
    """What `narrowgauge train ...` would run, and where; a mistake in it is found here."""
    options = _options(words)
    return make_config(_values(options)), options.out


def _train(options: argparse.Namespace) -> None:
    console = Console()
    allowed = [key.strip() for key in options.allow_change.split(",") if key.strip()]
    path = run(make_config(_values(options)), options.out, console, allowed, options.profile)
    if world_from(os.environ, 0).rank:  # the first of several processes reports for all
        return
    report = write_report([path], path / "report.html")
    print_comparison([read_run(path)], console)
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)


def _plan(options: argparse.Namespace) -> None:
    machine.run_plan(make_config(_values(options)), options)


def _scaling(options: argparse.Namespace) -> None:
    machine.run_scaling(options, lambda: make_config(_values(options)))


def _convert(options: argparse.Namespace) -> None:
    step = convert_run(options.run, options.recipe, options.out)
    print(f"{options.out}: the state of {options.run} after step {step}, under recipe {options.recipe}")
    print(f"to go on: narrowgauge train {options.out}/config.toml --out {options.out}")


def _report(options: argparse.Namespace) -> None:
    out = options.out or options.runs[0] / "report.html"
    runs = [read_run(path) for path in options.runs]
    print(f"report: {write_report(options.runs, out)}")
    print_comparison(runs, Console())


def _recipes(options: argparse.Namespace) -> None:
    if options.name:
        print(recipe(options.name).text.rstrip())
        return
    device = device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    table = Table("recipe", "here", "what it is", box=None, header_style="bold")
    reasons: dict[str, list[str]] = {}
    for name in recipe_names():
        r = recipe(name)
        backend = choose_backend(r, device)
        table.add_row(name, backend.name, r.title)
        if r.is_narrow:
            reasons.setdefault(f"{backend.name}: {backend.reason}", []).append(name)
    console = Console()
    console.print(table)
    for reason, names in reasons.items():
        text = reason if len(reasons) == 1 else f"{', '.join(names)} {reason}"
        console.print(text, style="dim", markup=False, highlight=False)


def _formats(options: argparse.Namespace) -> None:
    names = [options.name] if options.name else format_names()
    table = Table(box=None, header_style="bold")
    table.add_column("format")
    for column in ("bits", "E.M", "bias", "max", "smallest normal", "smallest"):
        table.add_column(column, justify="right")
    for name in names:
        f = format(name)
        limits = (f.max, f.smallest_normal, f.smallest_subnormal)
        layout = f"{f.exponent_bits}.{f.mantissa_bits}"
        table.add_row(name, str(f.bits), layout, str(f.bias), *(f"{x:.6g}" for x in limits))
    Console().print(table)
    if options.name:
        print(f"not finite: {format(options.name).specials.value}")
        print(f"source: {format(options.name).source}")
    else:
        print("E.M: bits of exponent and mantissa")


if __name__ == "__main__":
    sys.exit(main())

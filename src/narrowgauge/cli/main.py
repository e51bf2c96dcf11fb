"""The command line: the parser of all verbs, and what each error prints.

Exit codes: 0 done, 2 wrong usage or input, 75 preempted after a save, 1 any other failure. A user's mistake
is one sentence on standard error, without a traceback.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from narrowgauge.checkpoint import PoisonedError, SaveError
from narrowgauge.cli import (
    analysis,
    bench,
    compare,
    completion,
    launch,
    machine,
    prepare,
    recipes,
    runs,
    search,
    train,
)
from narrowgauge.cli.models import add_exchange_verbs
from narrowgauge.cli.options import Parser, add_config_options, config_values, unknown_argument
from narrowgauge.cluster import WorldFailed
from narrowgauge.distributed import StoppedByPeer, reports_for_all
from narrowgauge.errors import UserError, unknown
from narrowgauge.report.compare.compare import ComparisonFailed
from narrowgauge.signals import Preempted, StoppedEarly
from narrowgauge.training import (
    Config,
    Corrupted,
    Diverged,
    OutOfMemory,
    make_config,
)

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED = 0, 1, 2, 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    try:
        options = _options(sys.argv[1:] if arguments is None else list(arguments))
        action: Callable[[argparse.Namespace], int | None] = options.action
        code = action(options) or EXIT_DONE
        sys.stdout.flush()
    except (Preempted, StoppedEarly) as stop:
        return _end_for_all(stop, f"stopped by {stop}", EXIT_PREEMPTED)
    except StoppedByPeer as stop:  # another rank has said why
        return _end(str(stop), stop.code) if stop.is_printed else stop.code
    except (ComparisonFailed, WorldFailed) as error:
        # A run that ended by itself has said why.
        return error.code if error.code > 0 else _end_for_all(error, str(error), EXIT_FAILED)
    except (Corrupted, Diverged, OutOfMemory, PoisonedError, SaveError) as error:
        return _end(_with_notes(error), EXIT_FAILED)
    except UserError as error:
        return _end_for_all(error, str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _end("interrupted", EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output went away, as in `narrowgauge recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return EXIT_FAILED
    except OSError as error:  # a full disk, a file system that went away
        return _end(_with_notes(error), EXIT_FAILED)
    return code


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _with_notes(error: BaseException) -> str:
    """An error's sentence with its notes: the rank, the loader's thread."""
    return "; ".join([str(error), *_notes(error)])


def _end_for_all(error: BaseException, sentence: str, code: int) -> int:
    """End every process with the same code; one of them prints, or the rank that a note names."""
    return _end(sentence, code) if _notes(error) or reports_for_all(os.environ) else code


def _end(sentence: str, code: int) -> int:
    print(f"narrowgauge: {sentence}", file=sys.stderr)
    return code


def _options(arguments: list[str]) -> argparse.Namespace:
    parser, verbs = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        raise unknown("verb", arguments[0], verbs)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        raise unknown_argument(rest[0], options.parser)
    return options


def _parser() -> tuple[Parser, list[str]]:
    """The parser of the whole line, and the names of the verbs."""
    parser = Parser(
        prog="narrowgauge",
        description="Pre-train language models in narrow numbers, and see what the numbers did.",
        epilog="'narrowgauge VERB --help' explains each verb.",
        allow_abbrev=False,
    )
    parser.set_defaults(action=lambda options: parser.print_help(), parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", parser_class=Parser)

    def verb(name: str, help: str, action: Callable[[argparse.Namespace], int | None]) -> Parser:
        p = verbs.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False
        )
        p.set_defaults(action=action, parser=p)
        return p

    train.add_options(verb("train", train.HELP, train.run_train))
    p = verb("compare", compare.HELP, compare.run)
    compare.add_options(p)
    add_config_options(p)
    p = verb("plan", machine.PLAN_HELP, machine.run_plan)
    machine.add_plan_options(p)
    add_config_options(p)
    p = verb("bench", bench.HELP, bench.run)
    bench.add_options(p)
    add_config_options(p)
    machine.add_options(verb("doctor", machine.HELP, machine.run))
    p = verb("scaling", machine.SCALING_HELP, machine.run_scaling)
    machine.add_scaling_options(p)
    add_config_options(p)
    train.add_convert_options(verb("convert", train.CONVERT_HELP, train.run_convert))
    prepare.add_options(verb("prepare", "turn documents into token files", prepare.run))
    add_exchange_verbs(verb)
    analysis.add_probe_options(verb("probe", analysis.PROBE_HELP, analysis.run_probe))
    p = verb("sensitivity", analysis.SENSITIVITY_HELP, analysis.run_sensitivity)
    analysis.add_sensitivity_options(p)
    search.add_options(verb("search", search.HELP, search.run))
    p = verb("launch", "write the script that starts a run on a cluster", launch.run)
    launch.add_options(p, _read_train)
    train.add_report_options(verb("report", train.REPORT_HELP, train.run_report))
    recipes.add_recipes_options(verb("recipes", recipes.HELP, recipes.run_recipes))
    recipes.add_options(verb("formats", recipes.FORMATS_HELP, recipes.run_formats))
    recipes.add_options(verb("models", recipes.MODELS_HELP, recipes.run_models))
    runs.add_options(verb("runs", runs.HELP, runs.run))
    completion.add_options(verb("completion", completion.HELP, completion.run), verbs.choices)
    return parser, list(verbs.choices)


def _read_train(words: list[str]) -> tuple[Config, Path | None]:
    """The configuration and run directory of `narrowgauge train ...`; a mistake in the words is an error."""
    options = _options(words)
    return make_config(config_values(options)), options.out


if __name__ == "__main__":
    sys.exit(main())

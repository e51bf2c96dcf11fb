"""The parser of all verbs, and what the errors of a run print. It imports torch; `front` opens it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from narrowgauge.checkpoint import PoisonedError, SaveError
from narrowgauge.cli import (
    analysis,
    bench,
    compare,
    doctor,
    launch,
    machine,
    prepare,
    recipes,
    runs,
    search,
    train,
)
from narrowgauge.cli.ending import EXIT_FAILED, end, end_for_all, to_the_end, with_notes
from narrowgauge.cli.models import add_exchange_verbs
from narrowgauge.cli.parsing import completion
from narrowgauge.cli.parsing.key_parser import KeyParser
from narrowgauge.cli.parsing.options import add_config_options, config_values
from narrowgauge.cli.parsing.parser import Parser, check_verb, command_parser
from narrowgauge.cluster import WorldFailed
from narrowgauge.distributed import StoppedByPeer
from narrowgauge.experiment.engine import ComparisonFailed
from narrowgauge.runs import OutOfMemory
from narrowgauge.training import Config, Corrupted, Diverged, make_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return to_the_end(lambda: _run(words))


def _run(words: list[str]) -> int | None:
    """Run one verb; the failures of a run end here, the other errors in `to_the_end`."""
    try:
        options = _options(words)
        code: int | None = options.action(options)
    except StoppedByPeer as stop:  # another rank has said why
        return end(str(stop), stop.code) if stop.is_printed else stop.code
    except (ComparisonFailed, WorldFailed) as error:
        # A run that ended by itself has said why.
        return error.code if error.code > 0 else end_for_all(error, str(error), EXIT_FAILED)
    except (Corrupted, Diverged, OutOfMemory, PoisonedError, SaveError) as error:
        return end(with_notes(error), EXIT_FAILED)
    return code


def _options(arguments: list[str]) -> argparse.Namespace:
    check_verb(arguments)
    options, rest = _parser().parse_known_args(arguments)
    if rest:
        raise options.parser.unknown_argument(rest[0])
    options.command_line = arguments
    return options


def _parser() -> Parser:
    """The parser of the whole line."""
    parser, verb, verbs = command_parser(KeyParser)
    train.add_options(verb("train", train.run_train))
    p = verb("compare", compare.run)
    compare.add_options(p)
    add_config_options(p)
    p = verb("plan", machine.run_plan)
    machine.add_plan_options(p)
    add_config_options(p)
    p = verb("bench", bench.run)
    bench.add_options(p)
    add_config_options(p)
    doctor.add_options(verb("doctor", doctor.run))
    p = verb("scaling", machine.run_scaling)
    machine.add_scaling_options(p)
    add_config_options(p)
    train.add_convert_options(verb("convert", train.run_convert))
    prepare.add_options(verb("prepare", prepare.run))
    add_exchange_verbs(verb)
    analysis.add_probe_options(verb("probe", analysis.run_probe))
    analysis.add_sensitivity_options(verb("sensitivity", analysis.run_sensitivity))
    search.add_options(verb("search", search.run))
    p = verb("launch", launch.run)
    launch.add_options(p, _read_train)
    train.add_report_options(verb("report", train.run_report))
    recipes.add_recipes_options(verb("recipes", recipes.run_recipes))
    recipes.add_options(verb("formats", recipes.run_formats))
    recipes.add_options(verb("models", recipes.run_models))
    runs.add_options(verb("runs", runs.run))
    completion.add_options(verb("completion", completion.run), verbs)
    return parser


def _read_train(words: list[str]) -> tuple[Config, Path | None]:
    """The configuration and run directory of `narrowgauge train ...`; a mistake in the words is an error."""
    options = _options(words)
    return make_config(config_values(options)), options.out

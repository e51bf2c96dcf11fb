"""`probe`, `sensitivity` and `search`: questions to a trained model, answered without training."""

import argparse
import json

from rich.console import Console

from narrowgauge.laboratory.probe import probe
from narrowgauge.laboratory.search import search
from narrowgauge.laboratory.sensitivity import sensitivity
from narrowgauge.laboratory.subject import TextKeys, progress
from narrowgauge.recipes import recipe
from narrowgauge.result import Result


def run_probe(options: argparse.Namespace) -> None:
    """Probe, print the table or JSON, and store it in the run directory for the report."""
    named = [recipe(name) for name in _names(options.recipes or "")]
    with progress(Console(stderr=options.json), "probe") as show:
        found = probe(options.run, named, options.draws, show=show, **_text(options))
    _print(found, options.json)


def run_sensitivity(options: argparse.Namespace) -> None:
    """Find the cost of each layer and place, print the map or JSON, and store it."""
    with progress(Console(stderr=options.json), "sensitivity") as show:
        found = sensitivity(
            options.run,
            options.to,
            options.exact,
            fork_steps=options.fork_steps,
            fork_seeds=options.fork_seeds,
            show=show,
            **_text(options),
        )
    _print(found, options.json)


def run_search(options: argparse.Namespace) -> None:
    """Search, write the recipe, and with --check train it along with its baselines."""
    found = search(
        options.run,
        _names(options.formats),
        options.budget,
        options.out,
        keep=_names(options.keep),
        loss_per_doubling=options.loss_per_doubling,
        fork_steps=options.fork_steps,
        fork_seeds=options.fork_seeds,
        check=options.check,
        seeds=options.seeds,
        steps=options.steps,
        console=Console(stderr=options.json),
        **_text(options),
    )
    if options.json:
        _print(found, as_json=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _text(options: argparse.Namespace) -> TextKeys:
    """The text and the device that the options specify."""
    return {
        "data": options.data,
        "batches": options.batches,
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "device": options.device,
        "tokenizer": options.tokenizer,
    }


def _print(found: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        found.show(Console())

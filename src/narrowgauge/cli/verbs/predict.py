"""`predict`: forecasts the loss gap of a recipe at a size and a length, from published runs."""

import argparse
import json
import os

from rich.console import Console

from narrowgauge.errors import UserError
from narrowgauge.units import parse_count


def run(options: argparse.Namespace) -> int:
    """Print the forecasts; the exit code is 1 if all are refused."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of small matrices, before numpy is imported
    from narrowgauge.experiment.forecast import predict

    names = [name.strip() for name in options.recipe.split(",") if name.strip()]
    found = predict(
        names,
        None if options.params is None else _count("--params", options.params),
        _count("--tokens", options.tokens),
        options.atlas,
        model=options.model,
        runs=options.runs,
        probe=options.probe,
    )
    if options.out is not None:
        found.save(options.out)
    if options.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(found.table())
        if options.explain:
            console.print("\n" + found.explain())
        if options.out is not None:
            console.print(f"written: {options.out}")
    return 1 if all(one.refused for one in found) else 0


def _count(option: str, text: str) -> float:
    """A number such as 1.9e9, 1.9B or 38B.

    Raises:
        UserError: the text is not a number of at least 1.
    """
    if not (number := parse_count(text)):
        raise UserError(f"{option} {text!r}: it must be a number such as 1.9e9 or 38B")
    return number

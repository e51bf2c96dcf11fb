"""`python -m narrowgauge.conformance MODULE`: a table of what passes, and the first element that differs."""

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from narrowgauge.conformance.compare import Result, compare
from narrowgauge.conformance.vectors import FOLDER, read_vectors
from narrowgauge.system.errors import UserError

ALL_PASS, SOME_DIFFER, WRONG_USE = 0, 1, 2


def main(words: Sequence[str] | None = None) -> int:
    """Compare a module with the vectors; returns 0 if all it supports pass, 1 if not, 2 on misuse."""
    parser = argparse.ArgumentParser(
        prog="python -m narrowgauge.conformance",
        description="compare another library's quantizer with the conformance vectors",
        epilog="the module has a function quantize(x, cast); see help(narrowgauge.conformance)",
    )
    parser.add_argument("module", metavar="MODULE", help="a module's name, or the path of a .py file")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names of vectors, such as 'mxfp4 *'")
    parser.add_argument("--vectors", metavar="FOLDER", type=Path, default=FOLDER)
    options = parser.parse_args(words)
    try:
        quantize = _function(options.module)
        chosen = [v for v in read_vectors(options.vectors) if fnmatchcase(v.name, options.only)]
        if not chosen:
            raise UserError(f"--only {options.only!r} fits the name of no vector; '*' fits all")
    except UserError as error:
        print(f"narrowgauge.conformance: {error}", file=sys.stderr)
        return WRONG_USE
    results = [compare(quantize, vector) for vector in chosen]
    _print(results, options.module)
    held = [r.verdict for r in results if r.verdict != "is not there"]
    return ALL_PASS if held and set(held) == {"passes"} else SOME_DIFFER


def _function(name: str) -> Callable[..., Any]:
    """The function `quantize` of a module."""
    try:
        if name.endswith(".py"):
            sys.path.insert(0, str(Path(name).resolve().parent))  # its imports may be in the same folder
            members = runpy.run_path(name)
        else:
            sys.path.insert(0, "")  # a module in the working directory
            members = vars(importlib.import_module(name))
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(
            f"module {name!r} cannot be imported: {error}; name a module, or a .py file"
        ) from None
    function: Callable[..., Any] | None = members.get("quantize")
    if function is None:
        raise UserError(
            f"module {name!r} has no function quantize(x, cast); add one that returns codes and scales"
        )
    return function


def _print(results: Sequence[Result], module: str) -> None:
    """Print one line per cast and, for each input that differs, its first difference."""
    rows = [("cast", "passes", "the first difference", "inputs that differ")]
    casts: dict[str, list[Result]] = {}
    for result in results:
        casts.setdefault(_cast(result), []).append(result)
    missing = []
    for cast, of_cast in casts.items():
        held = [r for r in of_cast if r.verdict != "is not there"]
        if not held:
            missing.append(cast)
            continue
        wrong = [r for r in held if r.verdict != "passes"]
        first = _first(wrong[0]) if wrong else ""
        inputs = ", ".join(
            dict.fromkeys(r.vector.name.removeprefix(cast).strip() or r.vector.input for r in wrong)
        )
        rows.append((cast, f"{len(held) - len(wrong)} of {len(held)}", first, inputs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    passed = sum(r.verdict == "passes" for r in results)
    held_by = sum(r.verdict != "is not there" for r in results)
    print(f"{module}: {passed} of {held_by} vectors pass")
    if missing:
        print(f"it does not have: {', '.join(missing)}")


def _cast(result: Result) -> str:
    """The name of a vector without its input."""
    name, tensor = result.vector.name.removesuffix(" axis 0"), result.vector.input
    return name.removesuffix(f" {tensor}")


def _first(result: Result) -> str:
    """The first difference of a vector, in a few words."""
    if not result.differences:
        return result.why
    d = result.differences[0]
    where = f" {list(d.where)}" if d.where else ""
    return f"{result.vector.input}: {d.what}{where} is {d.text} ({d.share:.2%} of them differ)"


if __name__ == "__main__":
    sys.exit(main())

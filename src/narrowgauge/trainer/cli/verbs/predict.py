"""`predict`: forecasts the loss gap of a recipe at a size and a length, from published runs."""

import os
from pathlib import Path
from typing import Annotated

from narrowgauge.trainer.laboratory.arguments import Amount, File, Form, Names


def predict(
    *,
    recipe: Annotated[Names, Form("R,..."), "recipes, schemes of the atlas, .toml files"],
    params: Annotated[Amount | None, "parameters without embeddings, as in 1.9B"] = None,
    model: Annotated[str | None, Form("NAME")] = None,
    tokens: Annotated[Amount, Form("D"), "training tokens, as in 38e9 or 38B"],
    runs: Annotated[tuple[Path, ...] | None, Form("DIR")] = None,
    probe: File | None = None,
    atlas: Annotated[File | None, "other points than those that ship (docs/forecast.md)"] = None,
    explain: Annotated[bool, "the points behind it, and what published laws say"] = False,
    out: Annotated[File | None, "write a picture (.svg), .json, .csv or .txt"] = None,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Forecast a recipe's loss gap at a size and length, from published runs.

    narrowgauge predict --recipe mxfp8,nvfp4 --params 8e9 --tokens 1T

    Args:
        model: A named model in place of --params (narrowgauge models).
        runs: Your own: a folder of compare, or run directories with the reference first.
        probe: What probe --json printed, of the recipe and of one with points, such as nvfp4.
    """
    from json import dumps

    from rich.console import Console

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of small matrices, before numpy is imported
    from narrowgauge.trainer.experiment.forecast import predict as forecast

    found = forecast(recipe, params, tokens, atlas, model=model, runs=runs, probe=probe)
    if out is not None:
        found.save(out)
    if json:
        print(dumps(found.as_json(), indent=1))
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(found.table())
        if explain:
            console.print("\n" + found.explain())
        if out is not None:
            console.print(f"written: {out}")
    return 1 if all(one.refused for one in found) else 0

"""Answers a request for forecasts: recipes by name, a size or a named model, runs and a probe as files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from narrowgauge.forecast import (
    Atlas,
    Forecaster,
    Forecasts,
    Observed,
    read_atlas,
    read_probe_file,
    scheme,
    scheme_names,
)
from narrowgauge.recipes import Recipe, RecipeLike, recipe_list, recipe_names
from narrowgauge.recipes import recipe as named_recipe
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_count
from narrowgauge.trainer.models import count_block_weights, model_config
from narrowgauge.trainer.report import read_runs
from narrowgauge.trainer.report.read.run import folders, is_run
from narrowgauge.trainer.report.verdict.expected import own_points


def predict(
    recipe: RecipeLike | Sequence[RecipeLike],
    params: float | str | None = None,
    tokens: float | str | None = None,
    atlas: str | Path | Atlas | None = None,
    *,
    model: str | None = None,
    runs: str | Path | Sequence[str | Path] | None = None,
    probe: str | Path | None = None,
) -> Forecasts:
    """Forecast the loss gap of one recipe or several to bf16, without training.

    Args:
        recipe: A shipped recipe or a scheme of the atlas by name, a `.toml` file, a dictionary with its
            keys, a `Recipe`, or several.
        params: Parameters without embeddings, such as 1.9e9 or "1.9B".
        tokens: Tokens of training, such as 38e9 or "38B".
        atlas: Points in place of those that ship: a file of the same columns, or an `Atlas`.
        model: A named model in place of `params`; its weights in linear layers of blocks count.
        runs: A folder of `compare`, or run directories with the reference first; their gaps become points.
        probe: What `probe --json` printed, of the recipe and of one with points: evidence on its kappa.

    Returns:
        The forecasts, in the order of the recipes; `refused` holds the reason for one without support.

    Raises:
        UserError: A recipe, model or file is not what it should be, two recipes share a name, or a number
            is not above 0.
    """
    if not (named := recipe_list(recipe)):
        raise UserError("predict needs a recipe, such as nvfp4")
    recipes: dict[str, Recipe] = {}
    for one in named:
        name, found = _named(one)
        if recipes.setdefault(name, found) != found:
            raise UserError(f"two recipes are named {name}; give each another name, as in name = 'mine'")
    if (params is None) == (model is None):
        raise UserError("predict needs one size: params, such as 1.9e9, or model, a name such as llama3-8b")
    size = parse_count(str(params)) if model is None else float(count_block_weights(model_config(name=model)))
    if not size:
        raise UserError(f"params = {params}: predict needs the parameters without embeddings, such as 1.9e9")
    if not (length := parse_count(str(tokens))):
        raise UserError(f"tokens = {tokens}: predict needs the tokens of training, such as 38e9")
    points, of_runs = ([], {}) if runs is None else _points_of(runs)
    forecaster = Forecaster(
        atlas if isinstance(atlas, Atlas) or atlas is None else read_atlas(str(atlas)),
        points,
        None if probe is None else read_probe_file(Path(str(probe))),
        {**of_runs, **recipes},
    )
    return Forecasts(
        [forecaster.forecast(one, size, length, name) for name, one in recipes.items()], forecaster
    )


def _named(one: RecipeLike) -> tuple[str, Recipe]:
    """The name of a recipe, and the recipe."""
    if isinstance(one, str) and one in scheme_names() and one not in recipe_names():
        return one, scheme(one).recipe
    found = named_recipe(one)
    return found.name, found


def _points_of(runs: str | Path | Sequence[str | Path]) -> tuple[list[Observed], Mapping[str, Recipe]]:
    """The gaps of the user's runs, and their recipes."""
    several = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    found: list[Path] = []
    for path in (Path(str(one)) for one in several):
        if not (here := list(folders(path, is_run, depth=1))):
            raise UserError(
                f"--runs {path} cannot be read as runs; name a folder of narrowgauge compare, or runs"
            )
        found += sorted(here, key=lambda one: not one.name.startswith(("bf16", "fp32")))
    points, recipes = own_points(read_runs(found))
    if not points:
        raise UserError(
            f"{', '.join(map(str, several))}: no recipe has a loss at equal tokens with the reference, "
            f"which comes first; "
            "train one with narrowgauge compare --recipes bf16,R"
        )
    return points, recipes

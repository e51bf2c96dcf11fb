"""Recipes by name: shipped ones, and those that users write."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import fill

from narrowgauge.quantization import cast_names
from narrowgauge.recipes.recipe import Recipe, RecipeLike
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import named_text, shipped_text, unknown_name
from narrowgauge.system.toml_text import parse_toml

#: The modes of MS-AMP's GPT-3 scripts that have another name here.
_MODES = {"te": "fp8", "msamp": "msamp-o2"}
parse_recipe = Recipe.from_toml


@cache
def _files() -> dict[str, dict[str, str]]:
    """The shipped recipes in the order of tables: their files below `shipped/`, and what is known of each."""
    notes = parse_toml(shipped_text("recipes", "shipped"), "list of recipes")
    return {file.replace("/", "-"): {"file": file, **of_file} for file, of_file in notes.items()}


def differs(name: str) -> str:
    """What a shipped recipe does otherwise than its source; "" for nothing, and for any other name."""
    return _files().get(name, {}).get("differs", "")


def comment(name: str) -> str:
    """The same as comments that follow the recipe's text."""
    said = differs(name)
    return said and "\n\n" + fill(f"# Differs from its source: {said}.", 110, subsequent_indent="# ")


def recipe_names(tool: str = "") -> list[str]:
    """Names of the shipped recipes.

    Args:
        tool: "" for those that train, or "modelopt" or "nemo-rl" for those read from that tool's files.
    """
    folders = [of_file["file"].rpartition("/")[0] for of_file in _files().values()]
    if tool not in folders:
        raise unknown("tool", tool, filter(None, dict.fromkeys(folders)))
    return [name for name, folder in zip(_files(), folders, strict=True) if folder == tool]


def is_shipped(one: Recipe) -> bool:
    """Whether a recipe is the shipped one of its name, in every place."""
    return one.name in _files() and one.casts == _shipped(one.name).casts


@cache
def _shipped(name: str) -> Recipe:
    return parse_recipe(shipped_text("recipes/shipped", _files()[name]["file"]), f"{name}.toml")


def recipe_list(given: RecipeLike | Sequence[RecipeLike]) -> list[RecipeLike]:
    """One recipe or several, as a list.

    Raises:
        UserError: It is neither.
    """
    if isinstance(given, str | Path | Mapping | Recipe):
        return [given]
    if not isinstance(given, Iterable):
        raise UserError(
            f"recipes = {given!r}: a recipe is a name, a .toml file, a dictionary or a Recipe, and several "
            "stand in a list, as in ['bf16', 'mxfp8']"
        )
    return list(given)


def recipe(name: RecipeLike) -> Recipe:
    """A shipped recipe by its name, another by the path of its `.toml` file, or one from a dictionary.

    Args:
        name: A name such as "mxfp8", a path, a dictionary with the keys of a file (`Recipe.from_dict`), or a
            recipe, which is returned as it is.

    Raises:
        UserError: There is no such recipe (the message suggests the nearest), or the file is invalid.
    """
    if isinstance(name, Recipe):
        return name
    if isinstance(name, Mapping):
        return Recipe.from_dict(name)
    name = str(name)
    if name.endswith(".toml"):
        return load_recipe(name)
    if name not in _files():
        raise _unknown(name)
    return _shipped(name)


def _unknown(name: str) -> UserError:
    """The error for an unknown recipe name."""
    if "," in name:
        return UserError(
            f"{name!r} where one recipe goes; 'narrowgauge compare --recipes {name}' trains under each"
        )
    if name in _MODES:
        return UserError(f"unknown recipe {name!r}; what MS-AMP's scripts call so is {_MODES[name]!r} here")
    if name in cast_names():
        return UserError(
            f"unknown recipe {name!r}; it is a cast, which goes into a place of a recipe, as in "
            f"--recipe.fprop.x {name}"
        )
    if name and Path(name).is_dir():
        return UserError(f"recipe {name!r} is a directory; name a .toml file, or one that ships")
    error = unknown_name("recipe", name, _files())
    return error if "; " in str(error) else UserError(f"{error}; 'narrowgauge recipes' lists all")


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a TOML file.

    Raises:
        UserError: The file cannot be read or is not a recipe.
    """
    return parse_recipe(named_text("recipe", str(path)), str(path))

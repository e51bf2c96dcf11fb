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

# Recipes that were read from a tool's own files (`exchange`), each in the tool's folder. ModelOpt's are about
# the forward pass, NeMo-RL's about mixtures of experts, so the tables of training formats leave them out.
_OF_TOOLS: Mapping[str, tuple[str, ...]] = {
    "modelopt": (
        "fp8-default",
        "fp8-per-channel-per-token",
        "fp8-2d-blockwise-weight-only",
        "mxfp8",
        "mxint8",
        "mxfp6",
        "w4a8-mxfp4-fp8",
        "w4a8-nvfp4-fp8",
        "mxfp4",
        "mxfp4-mlp-weight-only",
        "nvfp4-default",
        "nvfp4-mlp-only",
        "nvfp4-omlp-only",
        "nvfp4-experts-only",
        "nvfp4-weight-only",
        "nvfp4-mlp-weight-only",
    ),
    "nemo-rl": ("nvfp4-routed-experts", "mxfp8-routed-experts"),
}
#: The modes of MS-AMP's GPT-3 scripts that have another name here.
_MODES = {"te": "fp8", "msamp": "msamp-o2"}


@cache
def _notes() -> dict[str, dict[str, str]]:
    """The shipped recipes that train, in the order of tables, each with what is known of it."""
    return parse_toml(shipped_text("recipes", "shipped"), "list of recipes")


@cache
def _files() -> dict[str, str]:
    """The file of each recipe, below `shipped/`."""
    of_tools = {f"{tool}-{name}": f"{tool}/{name}" for tool, names in _OF_TOOLS.items() for name in names}
    return {name: name for name in _notes()} | of_tools


def differs(name: str) -> str:
    """What a shipped recipe does otherwise than its source; "" for nothing, and for any other name."""
    return _notes().get(name, {}).get("differs", "")


def comment(name: str) -> str:
    """The same as comments that follow the recipe's text."""
    said = differs(name)
    return said and "\n\n" + fill(f"# Differs from its source: {said}.", 110, subsequent_indent="# ")


def recipe_names(tool: str = "") -> list[str]:
    """Names of the shipped recipes.

    Args:
        tool: "" for those that train, or "modelopt" or "nemo-rl" for those read from that tool's files.
    """
    if tool and tool not in [*_OF_TOOLS]:
        raise unknown("tool", tool, _OF_TOOLS)
    return [f"{tool}-{name}" for name in _OF_TOOLS[tool]] if tool else list(_notes())


def parse_recipe(text: str, where: str) -> Recipe:
    """Parse the text of a TOML file into a recipe (`Recipe.from_toml`)."""
    return Recipe.from_toml(text, where)


def is_shipped(one: Recipe) -> bool:
    """Whether a recipe is the shipped one of its name, in every place."""
    return one.name in _files() and one.casts == _shipped(one.name).casts


@cache
def _shipped(name: str) -> Recipe:
    return parse_recipe(shipped_text("recipes/shipped", _files()[name]), f"{name}.toml")


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

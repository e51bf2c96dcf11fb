"""The recipes that ship, and those of a user's own: found by name, or read from a file."""

from functools import cache
from pathlib import Path

from narrowgauge.errors import UserError, unknown
from narrowgauge.files import shipped_text
from narrowgauge.recipes.parse import parse_recipe
from narrowgauge.recipes.recipe import Recipe

# The order in which tables list them: references first, then from wide to narrow.
_SHIPPED = (
    "fp32",
    "bf16",
    "bf16-sr",
    "fp16",
    "fp8",
    "fp8-delayed",
    "fp8-row",
    "fp8-row-hp",
    "fp8-block",
    "fp8-fnuz",
    "msamp-o1",
    "msamp-o2",
    "msamp-o3",
    "coat",
    "mxfp8",
    "mxint8",
    "mxfp6-e2m3",
    "mxfp6-e3m2",
    "mxfp4",
    "nvfp4",
    "fp4",
    "quartet",
)


def recipe_names() -> list[str]:
    """Names of the recipes that ship."""
    return list(_SHIPPED)


@cache
def _shipped(name: str) -> Recipe:
    return parse_recipe(shipped_text("recipes/shipped", name), f"{name}.toml")


def recipe(name: str) -> Recipe:
    """A shipped recipe by name, or one's own by the path of its `.toml` file.

    Raises:
        UserError: neither; the sentence names the nearest recipe.
    """
    if name.endswith(".toml"):
        return load_recipe(name)
    if name not in _SHIPPED:
        raise unknown("recipe", name, _SHIPPED)
    return _shipped(name)


def load_recipe(path: str | Path) -> Recipe:
    """A recipe from a TOML file of one's own.

    Raises:
        UserError: the file cannot be read or is no recipe.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe file {path} cannot be read: {error}") from None
    return parse_recipe(text, str(path))

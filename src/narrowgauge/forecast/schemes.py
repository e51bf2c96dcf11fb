"""Published schemes as recipes: one TOML file each in `schemes/`, in the form of every recipe.

Where a paper trained something that a recipe cannot express, its scheme is the nearest recipe, and `differs`
describes what is not the same. `schemes.toml` holds that sentence and the shipped recipe of the same method.
"""

from dataclasses import dataclass
from functools import cache

from narrowgauge.errors import unknown
from narrowgauge.files import shipped_text
from narrowgauge.recipes import Recipe, parse_recipe, recipe, recipe_names
from narrowgauge.toml_text import parse_toml


@dataclass(frozen=True, slots=True)
class Scheme:
    """A recipe of the atlas.

    Attributes:
        recipe: The recipe; its name is the scheme's.
        kin: The shipped recipe of the same method, whose details may differ; "" for none.
        differs: What the published runs did that the recipe does not; "" for nothing known.
    """

    recipe: Recipe
    kin: str
    differs: str


@cache
def _notes() -> dict[str, dict[str, str]]:
    return parse_toml(shipped_text("forecast", "schemes"), "list of schemes")


def scheme_names() -> list[str]:
    """The names of the schemes that ship with the atlas, in addition to the shipped recipes."""
    return list(_notes())


@cache
def scheme(name: str) -> Scheme:
    """The scheme called `name`: one of the atlas, or a shipped recipe, which differs in nothing.

    Raises:
        UserError: There is neither; the sentence names the nearest.
    """
    if name in recipe_names():
        return Scheme(recipe(name), name, "")
    if name not in _notes():
        raise unknown("recipe or scheme", name, [*recipe_names(), *scheme_names()])
    notes = _notes()[name]
    made = parse_recipe(shipped_text("forecast/schemes", name), f"{name}.toml")
    return Scheme(made, notes.get("kin", ""), notes.get("differs", ""))

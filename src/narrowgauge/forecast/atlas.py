"""The atlas: every published loss gap of a low-precision recipe that could be sourced, one row each.

    gap_percent = 100 (loss - reference_loss) / reference_loss

The reference is the run of the same source that differs only in precision: the same model, tokens and
data in bf16 (the column `matched` records how it was found). `atlas.csv` lies in this folder;
`docs/forecast.md` names its sources. A user's own file has the same columns, and may have more.

Published schemes are recipes: one TOML file each in `schemes/`, in the form of every recipe. Where a paper
trained something that a recipe cannot express, its scheme is the nearest recipe, and `differs` describes what
is not the same. `schemes.toml` holds that sentence and the shipped recipe of the same method.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.recipes import Recipe, load_recipe, parse_recipe, recipe, recipe_names
from narrowgauge.system.errors import UserError, unknown, words_of
from narrowgauge.system.files import shipped_text
from narrowgauge.system.toml_text import parse_toml

#: The columns that every atlas has.
COLUMNS = (
    *("source", "locator", "date", "params", "tokens", "recipe", "gap_percent", "loss", "reference_loss"),
    *("seeds", "family", "tail_share"),
)
_OPTIONAL = ("gap_percent", "loss", "reference_loss", "tail_share")
_POSITIVE = (float, lambda x: 0 < x < math.inf, "a number above 0, such as 1.9e9")
#: How the text of a column is read, what its value must satisfy, and that in words; any other holds text.
_FORMS: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    **dict.fromkeys(("params", "tokens", "loss", "reference_loss"), _POSITIVE),
    "gap_percent": (float, math.isfinite, "a finite number"),
    "seeds": (int, lambda x: x > 0, "a number of runs, 1 or more"),
    "tail_share": (float, lambda x: 0 <= x <= 1, "a share from 0 to 1, or empty"),
    "date": (date.fromisoformat, bool, "a day such as 2026-02-20"),
}
_SHIPPED = Path(__file__).with_name("atlas.csv")
_ROUNDED = 0.006  # percent of the loss by which a published gap may miss the one of its losses: two decimals


@dataclass(frozen=True, slots=True)
class Scheme:
    """A recipe of the atlas."""

    recipe: Recipe  # its name is the scheme's
    kin: str  # the shipped recipe of the same method, whose details may differ; "" for none
    differs: str  # what the published runs did that the recipe does not; "" for nothing known


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published gap."""

    source: str  # the paper, repository or thread
    locator: str  # the place in the source: table, page, cell of a notebook, run, commit
    date: date  # the day on which the source was published in the form that was read
    params: float  # parameters, without embeddings where the source counts so
    tokens: float  # training tokens
    recipe: str  # a shipped recipe, a scheme of the atlas, or a recipe's file in the folder of a user's atlas
    gap_percent: float  # the loss above that of the reference, in percent of the reference's
    loss: float | None  # the loss in nats per token, or None
    reference_loss: float | None  # the loss of the reference in nats per token, or None
    seeds: int  # number of runs that the gap is averaged over
    family: str  # the points that share a lab, a model family, data and references
    # the share of blocks that stayed wide in the run; None takes what the recipe keeps
    tail_share: float | None
    more: Mapping[str, str] = field(default_factory=dict)  # what other columns hold, as text

    @property
    def tokens_per_param(self) -> float:
        """Training tokens for each parameter."""
        return self.tokens / self.params

    @property
    def gap_nats(self) -> float | None:
        """The gap in nats per token, or None if the source has no losses in nats."""
        if self.loss is None or self.reference_loss is None:
            return None
        return self.loss - self.reference_loss


@dataclass(frozen=True, slots=True)
class Atlas:
    """The points of one file, in its order, with the recipes that they name.

    Attributes:
        points: The points.
        recipes: The recipe behind each name in `Point.recipe`.
    """

    points: tuple[Point, ...]
    recipes: Mapping[str, Recipe]

    def __len__(self) -> int:
        return len(self.points)

    def column(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The values of one attribute of all points; NaN for a number that is missing."""
        values = [getattr(point, name) for point in self.points]
        is_number = any(isinstance(v, int | float) for v in values)
        return np.array([math.nan if v is None and is_number else v for v in values])

    def where(self, **wanted: Any) -> "Atlas":
        """The points whose attributes equal those given; a tuple of values admits any of them."""

        def fits(point: Point) -> bool:
            return all(
                getattr(point, key) in (value if isinstance(value, tuple) else (value,))
                for key, value in wanted.items()
            )

        return Atlas(tuple(point for point in self.points if fits(point)), self.recipes)


def read_atlas(path: str | Path | None = None) -> Atlas:
    """The atlas that ships, or a file of the same columns.

    Raises:
        UserError: The file cannot be read, a column is missing, or a value is not what its column holds; the
            sentence names the line.
    """
    return _shipped() if path is None else _read(Path(path))


@cache
def _shipped() -> Atlas:
    return _read(_SHIPPED)


def _read(path: Path) -> Atlas:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"atlas {path} cannot be read: {words_of(error)}") from None
    try:
        reader = csv.DictReader(StringIO(text, newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UserError(f"atlas {path} is not a CSV file: {error}") from None
    names = reader.fieldnames or []
    if missing := [name for name in COLUMNS if name not in names]:
        raise UserError(
            f"atlas {path} lacks the column{'s'[: len(missing) > 1]} {', '.join(missing)}; its first line "
            f"must name {', '.join(COLUMNS)}"
        )
    if not rows:
        raise UserError(f"atlas {path} has no points; write one line for each below its first")
    points = tuple(_point(row, f"atlas {path}, line {line}") for line, row in rows)
    return Atlas(points, _recipes(points, path))


def _point(row: Mapping[str | None, Any], where: str) -> Point:
    """The point of a row, whose values are all text."""
    if None in row or None in row.values():
        raise UserError(
            f"{where} has more or fewer values than there are columns; quote a value with a comma"
        )
    texts: dict[str, str] = {str(key): value.strip() for key, value in row.items()}
    values = {name: _value(name, texts[name], where) for name in COLUMNS}
    loss, reference, gap = (values[name] for name in ("loss", "reference_loss", "gap_percent"))
    if loss is not None and reference is not None:
        of_losses = 100 * (loss - reference) / reference
        if gap is not None and abs(gap - of_losses) > _ROUNDED + 0.01 * abs(of_losses):
            raise UserError(
                f"{where}: gap_percent = {gap:g}, but loss and reference_loss make it {of_losses:.4g}; "
                "correct one of them, or leave gap_percent empty"
            )
        values["gap_percent"] = of_losses if gap is None else gap
    elif gap is None:
        raise UserError(f"{where}: gap_percent is empty; give it, or both loss and reference_loss")
    return Point(**values, more={name: text for name, text in texts.items() if name not in COLUMNS})


def _value(name: str, text: str, where: str) -> Any:
    """The value of a column; None where it may be empty and is."""
    if name not in _FORMS:
        if not text:
            raise UserError(f"{where}: {name} is empty; a point without it is of no use")
        return text
    if not text and name in _OPTIONAL:
        return None
    of, is_valid, words = _FORMS[name]
    try:
        value = of(text)
        if is_valid(value):
            return value
    except ValueError:
        pass
    raise UserError(f"{where}: {name} = {text!r}, but it must be {words}")


def _recipes(points: Iterable[Point], path: Path) -> dict[str, Recipe]:
    """The recipe of each name; a name that ends in `.toml` is a file in the atlas's folder."""
    found: dict[str, Recipe] = {}
    for name in dict.fromkeys(point.recipe for point in points):
        if name.endswith(".toml"):
            found[name] = load_recipe(path.parent / name)
        elif name in recipe_names() or name in scheme_names():
            found[name] = scheme(name).recipe
        else:
            known = [*recipe_names(), *scheme_names()]
            raise UserError(f"atlas {path}: {unknown('recipe', name, known, 'FILE.toml')}")
    return found

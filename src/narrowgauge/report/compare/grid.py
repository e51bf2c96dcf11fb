"""What a comparison compares: variants, a grid of values, and seeds. Every point of it is one run.

    variants    recipes (--recipes), or sets of keys with a name (--variant)
    grid        the table [sweep] of the TOML file: a list of values for any key, every combination
    seeds       the same again from other weights and in another token order

A run lies in a directory named after its point, and the name depends on nothing but the point's own values:
`fp8`, `fp8,lr=0.002`, `fp8-seed-7`. So the same line continues a comparison, and one with more recipes, more
values or more seeds finds the runs that are there.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.training import Config, config_keys, make_config

Values = Mapping[str, Mapping[str, Any]]  # nested, as TOML has them
Keys = Mapping[str, Any]  # flat: {"section.key": value}
SEED, RECIPE = "training.seed", "recipe.name"
MOST_RUNS = 1000
_NEXT_KEY = re.compile(r",(?=[a-z_-]+(?:\.[\w.]+)?=)")  # a value may hold commas, as in betas=0.9,0.95
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Variant:
    """A name, and the keys that make it differ from the configuration they all share."""

    name: str
    keys: Keys


@dataclass(frozen=True)
class Point:
    """One run of a comparison: its directory's name, and its configuration."""

    name: str
    config: Config


def recipe_variants(text: str) -> list[Variant]:
    """Of `--recipes A,B,C`: each is named as its recipe, or as the file the recipe is in."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [Variant(Path(name).stem, {RECIPE: name}) for name in names]


def parse_variant(text: str, short: Mapping[str, str]) -> Variant:
    """Of `--variant NAME:KEY=VALUE,KEY=VALUE`; a key is a `section.key`, or one that `short` stands for.

    >>> parse_variant("hp:recipe=fp8,recipe.wgrad.x=bf16", {"recipe": "recipe.name"}).keys
    {'recipe.name': 'fp8', 'recipe.wgrad.x': 'bf16'}
    """
    name, _, rest = text.partition(":")
    keys: dict[str, str] = {}
    for pair in _NEXT_KEY.split(rest) if rest else []:
        key, equals, value = pair.partition("=")
        key = short.get(key, key)
        if not equals or "." not in key:
            raise UserError(
                f"--variant {text}: {pair!r} is no KEY=VALUE; write NAME:KEY=VALUE,KEY=VALUE with keys such "
                "as recipe.wgrad.x or optimizer.lr"
            )
        keys[key] = value
    return Variant(name, keys)


def parse_seeds(text: str, first: int) -> tuple[int, ...]:
    """Of `--seeds`: with commas these seeds, else so many from `first` on.

    >>> parse_seeds("3", 5), parse_seeds("1,7", 0), parse_seeds("4,", 0)
    ((5, 6, 7), (1, 7), (4,))
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    counted = "," not in text
    if not numbers or (counted and not 1 <= numbers[0] <= MOST_RUNS):
        raise UserError(f"--seeds {text}: write how many, as in 3, or which, as in 1,2,3")
    seeds = tuple(range(first, first + numbers[0])) if counted else tuple(numbers)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text} names a seed twice; a seed makes one run of each variant")
    return seeds


def take_sweep(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The values without their table `sweep`, and that table as {"section.key": [values]}.

    Raises:
        UserError: something in it is no list, or an empty one.
    """
    rest = {section: table for section, table in values.items() if section != "sweep"}
    grid: dict[str, list[Any]] = {}
    for key, choices in _flat(values.get("sweep", {})):
        if not isinstance(choices, list) or not choices:
            raise UserError(f"[sweep] {key} = {choices!r}: a sweep has a list of values for each key")
        grid[key] = choices
    return rest, grid


def make_points(
    values: Values, variants: Sequence[Variant], grid: Mapping[str, list[Any]], seeds: str
) -> list[Point]:
    """Every run of a comparison in order: variants and points of the grid at the first seed, then the next.

    Args:
        values: what they share.
        variants: where there are none, the shared values themselves are one, named as their recipe.
        grid: of `take_sweep`; `training.seed` in it is the same as `seeds`.
        seeds: as on the command line; "" for the configuration's own alone.

    Raises:
        UserError: a mistake in a configuration, a name that two runs would have, or no two runs.
    """
    base = make_config(values)
    own = base.training.seed
    if SEED in grid and seeds:
        raise UserError(f"--seeds {seeds} and [sweep] {SEED} both say which seeds; leave one of them out")
    chosen = parse_seeds(seeds, own) if seeds else tuple(grid.get(SEED, [own]))
    axes = {key: choices for key, choices in grid.items() if key != SEED}
    combinations = [dict(zip(axes, chosen_values, strict=True)) for chosen_values in product(*axes.values())]
    variants = variants or [Variant("" if RECIPE in axes else Path(base.recipe.name).stem, {})]
    count = len(variants) * len(combinations) * len(chosen)
    if count > MOST_RUNS:
        raise UserError(f"this comparison has {count} runs, and one may have {MOST_RUNS}; make it smaller")
    points = []
    for seed in chosen:
        suffix = "" if seed == own else f"-seed-{seed}"
        for variant in variants:
            _check(variant, axes)
            for keys in combinations:
                name = ",".join(filter(None, [variant.name, *_words(keys)])) + suffix
                points.append(Point(name, make_config(_with(values, {**variant.keys, **keys, SEED: seed}))))
    _require_distinct(points)
    return points


def _check(variant: Variant, axes: Mapping[str, list[Any]]) -> None:
    if variant.name and not _NAME.fullmatch(variant.name):
        raise UserError(
            f"--variant {variant.name!r} names a directory; use letters, digits and any of _ . + - in it"
        )
    if SEED in variant.keys:
        raise UserError(f"variant {variant.name!r} sets {SEED}; seeds are for all variants, by --seeds")
    if twice := sorted(variant.keys.keys() & axes.keys()):
        raise UserError(f"variant {variant.name!r} and [sweep] both set {twice[0]}; leave one of them out")


def _require_distinct(points: Sequence[Point]) -> None:
    names = [point.name for point in points]
    if len(names) < 2:
        raise UserError(
            f"{names[0]!r} is one run, and a comparison needs at least two; name recipes, as in "
            "--recipes bf16,fp8, add --variant or --seeds, or a [sweep] to the configuration file"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"two runs would be called {min(twice)!r}, and each has a directory of its own; name a recipe or "
            "a value once, or give the runs names by --variant"
        )


def _with(values: Values, keys: Keys) -> dict[str, dict[str, Any]]:
    """Nested values with flat keys over them."""
    merged = {section: dict(table) for section, table in values.items()}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        merged.setdefault(section, {})[name] = value
    return merged


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """TOML reads `optimizer.lr` as a table in a table; the whole keys again."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _words(keys: Keys) -> list[str]:
    """The values of a point as parts of a name, in the order of the keys' own names whatever that of the file
    is: `lr=0.002`; a recipe is its own name, and the first."""
    endings = [known.partition(".")[2] for known in config_keys()]
    words = []
    for key, value in sorted(keys.items(), key=lambda item: (item[0] != RECIPE, item[0])):
        ending = key.partition(".")[2]
        label = key if endings.count(ending) > 1 else ending
        parts = value if isinstance(value, list) else [value]
        said = re.sub(r"[^\w.+-]+", "-", "+".join(map(_said, parts))).strip("-")
        words.append(Path(str(value)).stem if key == RECIPE else f"{label}={said}")
    return words


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

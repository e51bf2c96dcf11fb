"""The points of a comparison: variants, a grid of values, and seeds. Every point is one run.

    variants    recipes (--recipes), or named sets of keys (--variant)
    grid        the table [sweep] of the TOML file: a list of values for any key, in every combination
    seeds       the same runs with other initial weights and another token order

A run directory is named after its point, and the name depends only on the values of the point: `fp8`,
`fp8,lr=0.002`, `fp8-seed-7`. So the same command line continues a comparison, and one with more recipes,
values or seeds reuses the existing runs.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from narrowgauge.errors import UserError
from narrowgauge.report.read.records import flatten
from narrowgauge.training import Config, config_keys, make_config

Values = Mapping[str, Mapping[str, Any]]  # nested, as TOML has them
Keys = Mapping[str, Any]  # flat: {"section.key": value}
SEED, RECIPE = "training.seed", "recipe.name"
MOST_RUNS = 1000
# A value may contain commas, as in betas=0.9,0.95, and a table in braces anything.
_NEXT_KEY = re.compile(r",(?=[a-z_-]+(?:\.[\w.]+)?=)(?![^{]*\})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Variant:
    """A name, and the keys in which the variant differs from the shared configuration."""

    name: str
    keys: Keys


@dataclass(frozen=True)
class Point:
    """One run of a comparison: the name of its directory, and its configuration."""

    name: str
    config: Config


def recipe_variants(text: str) -> list[Variant]:
    """Parse `--recipes A,B,C`: each variant is named after its recipe, or after the recipe's file."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [Variant(Path(name).stem, {RECIPE: name}) for name in names]


def parse_variant(text: str, short: Mapping[str, str]) -> Variant:
    """Parse `--variant NAME:KEY=VALUE,KEY=VALUE`; a key is a `section.key`, or a name in `short`.

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
                f"--variant {text}: {pair!r} is not KEY=VALUE; write NAME:KEY=VALUE,KEY=VALUE with keys such "
                "as recipe.wgrad.x or optimizer.lr"
            )
        if key in keys:
            raise UserError(f"--variant {text}: {key} has two values; leave one of them out")
        keys[key] = value
    return Variant(name, keys)


def parse_seeds(text: str, first: int) -> tuple[int, ...]:
    """Parse `--seeds`: a list of seeds if the text has a comma, else the number of seeds, counted from
    `first`.

    >>> parse_seeds("3", 5), parse_seeds("1,7", 0), parse_seeds("4,", 0)
    ((5, 6, 7), (1, 7), (4,))
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    is_count = "," not in text
    if not numbers or (is_count and not 1 <= numbers[0] <= MOST_RUNS):
        raise UserError(f"--seeds {text}: write how many, as in 3, or which, as in 1,2,3")
    seeds = tuple(range(first, first + numbers[0])) if is_count else tuple(numbers)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text} names a seed twice; a seed makes one run of each variant")
    return seeds


def take_sweep(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Split off the table `sweep`: the other values, and the sweep as {"section.key": [values]}.

    Raises:
        UserError: it is not a table, a key lacks its section, or a value is not a list or is empty.
    """
    rest = {section: table for section, table in values.items() if section != "sweep"}
    table = values.get("sweep", {})
    if not isinstance(table, Mapping):
        raise UserError(
            "'sweep' is one table of keys and lists; write [sweep] and optimizer.lr = [1e-3, 2e-3]"
        )
    grid: dict[str, list[Any]] = {}
    for key, choices in flatten(table).items():
        if not isinstance(choices, list) or not choices:
            raise UserError(
                f"[sweep] {key} = {choices!r}: a sweep has a list of values for each key; a value that is a "
                'table is written in a list as well, as in recipe.fprop.x = [{cast = "fp4-row"}, "bf16"]'
            )
        if not key.partition(".")[2]:
            raise UserError(
                f"[sweep] {key.rstrip('.')}: write the section and the key, as in optimizer.lr or recipe.name"
            )
        grid[key] = choices
    return rest, grid


def parse_sweeps(texts: Sequence[str], short: Mapping[str, str]) -> dict[str, list[Any]]:
    """Parse every `--sweep KEY=A,B,...` into {"section.key": [values]}, the values as text.

    A table in braces is one value, and so is a list in brackets, which is read as TOML.

    >>> parse_sweeps(["lr=1e-3,2e-3"], {"lr": "optimizer.lr"})
    {'optimizer.lr': ['1e-3', '2e-3']}
    >>> parse_sweeps(["recipe.fprop.x={element='e4m3', block=32},bf16"], {})
    {'recipe.fprop.x': ["{element='e4m3', block=32}", 'bf16']}

    Raises:
        UserError: a text is not KEY=A,B, or two texts have the same key.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, _, rest = text.partition("=")
        values = [_listed(value) for value in _split(rest) if value]
        key = short.get(key, key)
        if "." not in key or not values:
            raise UserError(f"--sweep {text}: write KEY=A,B with a key such as optimizer.lr")
        if key in grid:
            raise UserError(f"--sweep {text}: {key} is swept twice; write all its values in one --sweep")
        grid[key] = values
    return grid


def _split(text: str) -> list[str]:
    """The values between commas, except commas in braces, brackets or quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "{[") - (letter in "}]")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def _listed(text: str) -> Any:
    """A value in brackets as a list; any other value unchanged."""
    if not text.startswith("["):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_points(
    values: Values, variants: Sequence[Variant], grid: Mapping[str, list[Any]], seeds: str
) -> list[Point]:
    """List every run of a comparison: all variants and grid points with the first seed, then with the next.

    Args:
        values: the shared values.
        variants: the variants; if empty, the shared values are the only one, named after their recipe.
        grid: the sweep, from `take_sweep` and `parse_sweeps`; `training.seed` in it is the same as `seeds`.
        seeds: the text of `--seeds`; "" for the seed of the configuration alone.

    Returns:
        The points in the order of execution.

    Raises:
        UserError: a configuration is invalid, two runs have one name, or there are fewer than two runs.
    """
    base = make_config(values)
    base_seed = base.training.seed
    if SEED in grid and seeds:
        raise UserError(f"--seeds {seeds} and [sweep] {SEED} both say which seeds; leave one of them out")
    # The seeds of a sweep are parsed like --seeds, because the text "0" is not the seed 0.
    text = seeds or "".join(f"{seed}," for seed in grid.get(SEED, [base_seed]))
    chosen = parse_seeds(text, base_seed)
    axes = {key: choices for key, choices in grid.items() if key != SEED}
    combinations = [dict(zip(axes, chosen_values, strict=True)) for chosen_values in product(*axes.values())]
    variants = variants or [Variant("" if RECIPE in axes else Path(base.recipe.name).stem, {})]
    count = len(variants) * len(combinations) * len(chosen)
    if count > MOST_RUNS:
        raise UserError(f"this comparison has {count} runs, and one may have {MOST_RUNS}; make it smaller")
    points = []
    for seed in chosen:
        suffix = "" if seed == base_seed else f"-seed-{seed}"
        for variant in variants:
            _check(variant, axes)
            for keys in combinations:
                name = ",".join(filter(None, [variant.name, *_name_parts(keys)])) + suffix
                points.append(Point(name, make_config(_merge(values, {**variant.keys, **keys, SEED: seed}))))
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
            f"two runs would be called {min(twice)!r}, and each needs a separate directory; name a recipe or "
            "a value once, or give the runs names by --variant"
        )


def _merge(values: Values, keys: Keys) -> dict[str, dict[str, Any]]:
    """Nested values, overridden by flat keys."""
    merged = {section: dict(table) for section, table in values.items()}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        merged.setdefault(section, {})[name] = value
    return merged


def _name_parts(keys: Keys) -> list[str]:
    """The values of a point as parts of a name, such as `lr=0.002`: the recipe first, then by key."""
    endings = [known.partition(".")[2] for known in config_keys()]
    parts = []
    for key, value in sorted(keys.items(), key=lambda item: (item[0] != RECIPE, item[0])):
        ending = key.partition(".")[2]
        label = key if endings.count(ending) > 1 else ending
        values = value if isinstance(value, list) else [value]
        text = re.sub(r"[^\w.+-]+", "-", "+".join(map(_toml_text, values))).strip("-")
        parts.append(Path(str(value)).stem if key == RECIPE else f"{label}={text}")
    return parts


def _toml_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

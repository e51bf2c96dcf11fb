"""The runs of a comparison: variants times seeds.

    variants    recipes (--recipes), named sets of keys (--variant), or the table [arms] of the TOML file
    seeds       the same runs with other initial weights and another token order

A run directory is named after its arm and seed: `fp8`, `fp8-seed-7`. So the same command line continues a
comparison, and one with more recipes, variants or seeds reuses the existing runs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.report.read.stored import PlannedRun
from narrowgauge.trainer.training import Config, make_config

Values = Mapping[str, Mapping[str, Any]]  # nested, as TOML has them
Keys = Mapping[str, Any]  # flat: {"section.key": value}
Variant = tuple[str, Keys]  # a name, and the keys in which it differs from the shared configuration
Seeds = int | Sequence[int] | None  # how many, or which; None: that of the configuration
SEED, RECIPE = "training.seed", "recipe.name"
MOST_RUNS = 1000
# A value may contain commas, as in betas=0.9,0.95, and a table in braces anything.
_NEXT_KEY = re.compile(r",(?=[a-z_-]+(?:\.[\w.]+)?=)(?![^{]*\})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class ArmRun(PlannedRun):
    """A planned run with its configuration, which its readers do not have.

    It waits until its sources have ended, and begins with the first whose checkpoint is there, or at step 0,
    with the same digits.
    """

    config: Config = Field(exclude=True)
    sources: tuple[tuple[str, int], ...] = Field((), exclude=True)  # where it may branch off, at which steps

    @classmethod
    def of(cls, config: Config, **facts: Any) -> "ArmRun":
        """The run of a configuration, with its other fields."""
        steps = config.training.steps
        return cls(config=config, steps=steps, tokens=steps * config.tokens_per_step, **facts)

    @property
    def tokens_to_train(self) -> int:
        """The tokens that the run itself trains on: all of them, or those after the branch."""
        return self.tokens * (self.steps - (self.sources[0][1] if self.sources else 0)) // self.steps


def recipe_variants(names: Iterable[str]) -> list[Variant]:
    """The variants of some recipes: each is named after its recipe, or after the recipe's file."""
    return [(Path(name).stem, {RECIPE: name}) for name in names]


def take_arms(values: Mapping[str, Any], chosen: Sequence[str] = ()) -> tuple[dict[str, Any], list[Variant]]:
    """Split off the table [arms]: the other values, and a variant for each arm.

    If some are `chosen`, only these are left in the order of the file, and the first, the reference.
    """
    arms: list[Variant] = []
    for name, table in values.get("arms", {}).items():
        if not isinstance(table, Mapping) or not all(isinstance(t, Mapping) for t in table.values()):
            raise UserError(
                f"[arms] {name} = {table!r}: an arm has keys with their sections; write recipe.name = "
                f"{name!r} below [arms.{name}]"
            )
        keys = {f"{section}.{key}": value for section, t in table.items() for key, value in t.items()}
        arms.append((name, keys))
    known = [name for name, _ in arms]
    for name in chosen:
        if name not in known:
            raise unknown("arm", name, known)
    arms = [(name, keys) for name, keys in arms if not chosen or name in (known[0], *chosen)]
    return {section: table for section, table in values.items() if section != "arms"}, arms


def parse_variant(text: str, short: Mapping[str, str]) -> Variant:
    """Parse `--variant NAME:KEY=VALUE,KEY=VALUE`; a key is a `section.key`, or a name in `short`.

    >>> parse_variant("hp:recipe=fp8,recipe.wgrad.x=bf16", {"recipe": "recipe.name"})
    ('hp', {'recipe.name': 'fp8', 'recipe.wgrad.x': 'bf16'})
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
    return name, keys


def make_runs(values: Values, variants: Sequence[Variant], seeds: Seeds = None) -> list[ArmRun]:
    """List the runs of a comparison in their order: all variants with the first seed, then with the next.

    Without variants the shared values are the only one, named after their recipe. A number of seeds counts
    from the seed of the configuration.
    """
    base = make_config(values)
    base_seed = base.training.seed
    seeds = 1 if seeds is None else seeds
    chosen = tuple(range(base_seed, base_seed + seeds) if isinstance(seeds, int) else seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"--seeds {seeds}: a seed makes one run of each variant; name each once")
    variants = variants or [(Path(base.recipe.name).stem, {})]
    count = len(variants) * len(chosen)
    if count > MOST_RUNS:
        raise UserError(f"this comparison has {count} runs, and one may have {MOST_RUNS}; make it smaller")
    runs = []
    for seed in chosen:
        suffix = "" if seed == base_seed else f"-seed-{seed}"
        for arm, keys in variants:
            _check(arm, keys)
            config = make_config(with_keys(values, {**keys, SEED: seed}))
            runs.append(ArmRun.of(config, name=arm + suffix, arm=arm, seed=seed))
    _require_distinct(runs)
    return runs


def _check(name: str, keys: Keys) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"--variant {name!r} names a directory; use letters, digits and any of _ . + - in it")
    if SEED in keys:
        raise UserError(f"variant {name!r} sets {SEED}; seeds are for all variants, by --seeds")


def _require_distinct(runs: Sequence[ArmRun]) -> None:
    names = [run.name for run in runs]
    if len(names) < 2:
        raise UserError(
            f"{names[0]!r} is one run, and a comparison needs at least two; name recipes, as in "
            "--recipes bf16,fp8, or add --variant or --seeds"
        )
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"two runs would be called {min(twice)!r}, and each needs a separate directory; name a recipe "
            "once, or give the runs names by --variant"
        )


def with_keys(values: Values, keys: Keys) -> dict[str, dict[str, Any]]:
    """Nested values, overridden by flat keys."""
    merged = {section: dict(table) for section, table in values.items()}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        merged.setdefault(section, {})[name] = value
    return merged

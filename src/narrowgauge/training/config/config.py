"""The configuration of a run: one frozen tree, one level below the root, validated once, in sentences.

Values come from, later over earlier: the defaults below, a TOML file, `--section.key VALUE`. Both the file
and the command line end in `make_config`, so there is one set of names, one set of rules and one kind of
error. The defaults are the embedded run: a model of a few million parameters on Python's own source text.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from narrowgauge.data import split_sources
from narrowgauge.errors import UserError, unknown
from narrowgauge.models import ModelConfig, model_config
from narrowgauge.recipes import BACKENDS, KEYS, PLACES, Recipe, recipe
from narrowgauge.toml_text import toml_key, toml_value
from narrowgauge.training.config.schema import (
    CheckpointSection,
    DataSection,
    GaugesSection,
    GuardSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RecipeSection,
    ScheduleSection,
    Section,
    TrainingSection,
    ValidationSection,
)


class Config(Section):
    """Everything that defines a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    recipe: RecipeSection = RecipeSection()
    parallel: ParallelSection = ParallelSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    gauges: GaugesSection = GaugesSection()
    log: LogSection = LogSection()

    def gauges_every(self) -> int:
        """Steps between readings of the gauges, 0 for none; under compile only the number that was set."""
        is_default = "every" not in self.gauges.model_fields_set
        return 0 if self.training.compile and is_default else self.gauges.every

    def resolved_model(self) -> ModelConfig:
        """The model's dimensions: the named size with the section's other keys over it."""
        section = self.model.model_dump(exclude_none=True, exclude={"weights"})
        return model_config(**section)

    def resolved_recipe(self) -> Recipe:
        """The recipe, with the section's places over it."""
        return recipe(self.recipe.name).with_places(self.recipe.places)


def make_config(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """A valid configuration from nested values (text or typed).

    Raises:
        UserError: unknown section or key, a value of the wrong kind, values that do not go together.
    """
    try:
        config = Config.model_validate(_with_start(values))
    except ValidationError as error:
        raise _sentence(error) from None
    for place in config.recipe.places:
        if place not in KEYS:
            raise unknown("key", f"recipe.{place}", config_keys())
    if config.recipe.backend not in BACKENDS:
        raise unknown("backend", config.recipe.backend, BACKENDS)
    if config.data.weights:
        split_sources(config.data.source, config.data.weights)
    the_model = config.resolved_model()
    config.resolved_recipe()
    t = config.training
    if t.batch_size % t.micro_batch_size:
        raise UserError(
            f"training.batch_size = {t.batch_size} is no multiple of training.micro_batch_size = "
            f"{t.micro_batch_size}; a step is made of whole micro-batches"
        )
    if t.compile and config.gauges_every():
        raise UserError(
            f"gauges.every = {config.gauges.every} with training.compile = true: gauges cannot look into "
            "compiled code; set --gauges.every 0 or --training.compile false"
        )
    if config.data.sequence_length > the_model.max_sequence_length:
        raise UserError(
            f"data.sequence_length = {config.data.sequence_length} is longer than the model's "
            f"max_sequence_length = {the_model.max_sequence_length}; "
            f"shorten it or set --model.max_sequence_length"
        )
    return config


def _with_start(values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """With `model.weights`, the dimensions and the tokenizer of that run, where no others are given.

    A configuration that has been resolved has them all, and does not need the run any more.
    """
    model = values.get("model", {})
    if not isinstance(model, Mapping) or not model.get("weights"):
        return values
    run = Path(str(model["weights"]))
    if not (run / "config.toml").is_file():
        if "dim" in model:
            return values
        raise UserError(
            f"model.weights = {str(run)!r} is no run directory; make one of a model of another program with "
            f"'narrowgauge import {run} --out RUN'"
        )
    merged = {**values, "model": {**load_values(run / "config.toml").get("model", {}), **model}}
    data = values.get("data", {})
    if isinstance(data, Mapping) and (run / "tokenizer.json").is_file():
        merged["data"] = {"tokenizer": str(run / "tokenizer.json"), **data}
    return merged


def load_values(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: the file is missing, unreadable or no TOML, or a section in it is no table.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; beside it lie {', '.join(near[:5])}" if near else ""
        raise UserError(f"no configuration file {path}{hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"configuration file {path} cannot be read: {error}") from None
    for section, table in values.items():
        if section in Config.model_fields and not isinstance(table, dict):
            raise UserError(
                f"configuration file {path}: {section} = {table!r}, but it is a section; "
                f"write [{section}] above its keys"
            )
    return values


def config_keys() -> dict[str, str]:
    """Every `section.key` with its description and default, for `--help` and for error messages."""
    keys: dict[str, str] = {}
    for section, field in Config.model_fields.items():
        for key, inner in field.default.__class__.model_fields.items():
            if (section, key) == ("recipe", "places"):
                keys |= {f"recipe.{place}": "the cast of this place" for place in PLACES}
                keys["recipe.offload"] = "of master, grad, m, v: those in the host's memory (none)"
                keys["recipe.compute"] = "of products and of all that is not narrow: bf16, fp16 or fp32"
            else:
                default = "" if inner.default is None else f" ({_shown(inner.default)})"
                keys[f"{section}.{key}"] = f"{inner.description}{default}"
    return keys


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _sentence(error: ValidationError) -> UserError:
    """The first complaint of pydantic as one sentence of ours."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "extra_forbidden":
        if where == "sweep":
            return UserError(
                "section 'sweep' is a grid for `narrowgauge compare`; a run has one value of each key"
            )
        known = list(Config.model_fields) if len(first["loc"]) == 1 else list(config_keys())
        return unknown("section" if len(first["loc"]) == 1 else "key", where, known)
    rule = first["msg"][0].lower() + first["msg"][1:]
    return UserError(f"{where} = {first['input']!r}: {rule}; see 'narrowgauge train --help' for each key")


def to_toml(config: Config) -> str:
    """The whole configuration as TOML, resolved: it makes the same run again."""
    tables = config.model_dump()
    start = {"weights": config.model.weights} if config.model.weights else {}
    tables["model"] = {"name": config.model.name} | start | asdict(config.resolved_model())
    tables["recipe"] |= tables["recipe"].pop("places")
    tables["gauges"]["every"] = config.gauges_every()
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{toml_key(k)} = {toml_value(v)}" for k, v in table.items() if v is not None]
        lines.append("")
    return "\n".join(lines)


def trajectory(config: Config) -> dict[str, dict[str, Any]]:
    """The resolved values that decide every loss of the run; what is shown and kept is left out."""
    tables = tomllib.loads(to_toml(config))
    for key in ("memory_limit", "hang_timeout", "recompute_every"):
        del tables["training"][key]
    for place in ("offload", "gather"):  # the numbers are the same wherever they lie, and however they travel
        tables["recipe"].pop(place, None)
    guard = tables["guard"]
    told = guard["spike"] in ("off", "warn")  # which moves nothing
    kept = ["max_skips"] if told else ["max_skips", "spike", "spike_factor", "spike_window", "max_rollbacks"]
    tables["guard"] = {key: guard[key] for key in kept}
    beside = ("log", "checkpoint", "validation", "gauges", "parallel")
    return {section: t for section, t in tables.items() if section not in beside}

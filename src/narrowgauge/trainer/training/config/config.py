"""The configuration of a run: a frozen object with one level of sections, validated once.

Values come from the defaults below, a TOML file and `--section.key VALUE`; later ones override earlier ones.
Both the file and the command line end in `make_config`, so there is one set of names, one set of rules and
one form of error messages. The defaults are the embedded run: a model of a few million parameters on the
source text of Python. A configuration has a name if it is a file in `shipped/` of this folder, or a model
whose training is published (`models/published.toml`): `narrowgauge train gpt3-345m` needs no checkout.

**The size of a micro-batch.** Each data-parallel process has an equal share of a step's sequences, in whole
micro-batches. A pipeline needs at least as many micro-batches as it has stages; with several chunks a
multiple of them (interleaved 1F1B). A size that the user sets is never changed. Otherwise
(`training.fit_micro_batch`) a run uses the largest that fits, up to `training.micro_batch_size`: the default,
or the size that an existing run already has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from narrowgauge.distributed import ParallelDims
from narrowgauge.guard.raises import Raise, require_raising
from narrowgauge.optim import decay_start, learning_rate
from narrowgauge.recipes import BACKENDS, GROUPS, KEYS, Recipe, recipe
from narrowgauge.system.errors import UserError, require, unknown
from narrowgauge.system.files import named_text, shipped_names, shipped_text
from narrowgauge.system.toml_text import parse_toml, toml_value
from narrowgauge.trainer import data
from narrowgauge.trainer.models import model_config
from narrowgauge.trainer.models.published import Published, published, published_names
from narrowgauge.trainer.training.config import schema
from narrowgauge.trainer.training.config.synonyms import Key, outside, unknown_key
from narrowgauge.trainer.training.outline import require_layers

if TYPE_CHECKING:
    from narrowgauge.trainer.distributed import ModelSpec

Values = dict[str, dict[str, Any]]
_SHIPPED = "trainer/training/config/shipped"


class Config(schema.Section):
    """Everything that defines a run."""

    model: schema.ModelSection = schema.ModelSection()
    data: schema.DataSection = schema.DataSection()
    training: schema.TrainingSection = schema.TrainingSection()
    optimizer: schema.OptimizerSection = schema.OptimizerSection()
    schedule: schema.ScheduleSection = schema.ScheduleSection()
    recipe: schema.RecipeSection = schema.RecipeSection()
    parallel: schema.ParallelSection = schema.ParallelSection()
    validation: schema.ValidationSection = schema.ValidationSection()
    checkpoint: schema.CheckpointSection = schema.CheckpointSection()
    guard: schema.GuardSection = schema.GuardSection()
    gauges: schema.GaugesSection = schema.GaugesSection()
    log: schema.LogSection = schema.LogSection()

    @cached_property
    def spec(self) -> "ModelSpec":
        """The resolved model and recipe; a recipe's file is not read again.

        The model is the named size, overridden by the other keys of its section; the recipe is the named one,
        overridden by the places of its section.
        """
        from narrowgauge.trainer.distributed import ModelSpec  # here: the keys are listed without torch

        t = self.training
        return ModelSpec(
            model=model_config(**self.model.model_dump(exclude_none=True, exclude={"weights"})),
            recipe=recipe(self.recipe.name).with_places(self.recipe.places),
            seed=t.seed,
            rounding_seed=t.seed if t.rounding_seed < 0 else t.rounding_seed,
            backend=self.recipe.backend,
            recompute=t.recompute_every if t.recompute else 0,
            selective=t.recompute == "selective",
            chunked_loss=t.chunked_loss,
            z_loss=t.z_loss,
            balance_loss=t.balance_loss,
            batch_size=t.batch_size,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens in an optimizer step."""
        return self.training.batch_size * self.data.sequence_length

    def learning_rate(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 1."""
        return learning_rate(step, lr=self.optimizer.lr, steps=self.training.steps, **vars(self.schedule))

    @property
    def decay_start(self) -> int | None:
        """The first step whose learning rate is below the peak; None if there is none."""
        schedule = self.schedule.model_dump(exclude={"final_lr_fraction"})
        return decay_start(steps=self.training.steps, **schedule)

    @property
    def warning(self) -> str:
        """A sentence where the learning rate never reaches its peak; "" where it does."""
        warmup, steps = self.schedule.warmup_steps, self.training.steps
        words = f"the warm-up of {warmup} steps is longer than the run of {steps}: the rate stays below lr"
        return f"{words}; set --schedule.warmup_steps" if warmup > steps else ""

    def in_force(self, raises: Sequence[Raise], step: int) -> "Config":
        """The configuration with the recipe in effect after `step` steps."""
        recipe = self.spec.recipe.with_rules([r.rule(self.spec.recipe) for r in raises])
        return self.with_recipe(recipe.at_rest(step + 1, self.training.steps, self.decay_start))

    def with_training(self, **changes: Any) -> "Config":
        """The configuration with other values of `[training]`, which are not validated."""
        return self.model_copy(update={"training": self.training.model_copy(update=changes)})

    def with_recipe(self, recipe: Recipe) -> "Config":
        """The configuration of the same run under another recipe than that of its section."""
        copy = super().model_copy()
        copy.__dict__["spec"] = replace(self.spec, recipe=recipe)
        return copy

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Config":
        """A copy with other sections, under the same recipe unless that section is another."""
        copy = super().model_copy(update=update, deep=deep)
        own = copy.__dict__.pop("spec", None)
        return copy if own is None or "recipe" in (update or {}) else copy.with_recipe(own.recipe)


def make_config(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """Make a valid configuration from nested values (text or typed).

    Raises:
        UserError: a section or key is unknown, a value has the wrong type, or values contradict each other.
    """
    require("a configuration", values, Mapping)
    try:
        config = Config.model_validate(_with_initial_run(values))
    except ValidationError as error:
        raise _user_error(error) from None
    if config.training.compile and "every" not in config.gauges.model_fields_set:  # its default with compile
        config = config.model_copy(update={"gauges": schema.GaugesSection(every=0)})
    for place in config.recipe.places:
        if place not in KEYS:
            raise unknown_key(f"recipe.{place}", config_keys())
    if config.recipe.backend not in BACKENDS:
        raise unknown("backend", config.recipe.backend, BACKENDS)
    if config.schedule.kind == "constant" and any(r.follows_schedule for r in config.spec.recipe.rules):
        raise UserError(
            f"a rule of recipe {config.recipe.name!r} waits for the decay of the learning rate, and "
            "schedule.kind = 'constant' has none; choose another kind, or write from_share in the rule"
        )
    if config.data.weights:
        data.split_sources(config.data.source, config.data.weights)
    t, alone = config.training, ParallelDims()
    if t.fit_micro_batch:
        config = config.with_training(micro_batch_size=largest_size(t.batch_size, alone, t.micro_batch_size))
    model, t = config.spec.model, config.training
    if t.batch_size % t.micro_batch_size:
        raise UserError(
            f"training.batch_size = {t.batch_size} is not a multiple of training.micro_batch_size = "
            f"{t.micro_batch_size}, and a step is made of whole micro-batches; {what_fits(t, alone)}"
        )
    if t.compile and config.gauges.every:
        raise UserError(
            f"gauges.every = {config.gauges.every} with training.compile = true: gauges cannot look into "
            "compiled code; set --gauges.every 0 or --training.compile false"
        )
    if t.compile and model.experts:
        raise UserError(
            f"model.experts = {model.experts} with training.compile = true: how many tokens an expert has is "
            "not known when code is compiled; set --training.compile false"
        )
    require_layers(config.spec.recipe, model)
    if config.guard.spike == "raise":
        require_raising(config.spec.recipe, config.guard.raise_to, config.gauges.every)
    if config.data.sequence_length > model.max_sequence_length:
        raise UserError(
            f"data.sequence_length = {config.data.sequence_length} is longer than the model's "
            f"max_sequence_length = {model.max_sequence_length}; "
            f"shorten it or set --model.max_sequence_length"
        )
    return config


def _with_initial_run(values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """Fill in dimensions and tokenizer of the run in `model.weights`, unless they are set.

    A resolved configuration contains them all, and no longer needs that run.
    """
    model = values.get("model", {})
    if not isinstance(model, Mapping) or not model.get("weights"):
        return values
    run = Path(str(model["weights"]))
    if not (run / "config.toml").is_file():
        if "dim" in model:
            return values
        raise UserError(
            f"model.weights = {str(run)!r} is not a run directory; make one of another program's model with "
            f"'narrowgauge import {run} --out RUN'"
        )
    merged = {**values, "model": {**load_values(run / "config.toml").get("model", {}), **model}}
    data = values.get("data", {})
    if isinstance(data, Mapping) and (run / "tokenizer.json").is_file():
        merged["data"] = {"tokenizer": str(run / "tokenizer.json"), **data}
    return merged


def load_values(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file, or of the configuration that ships by this name.

    Raises:
        UserError: the file is missing, unreadable or not TOML, or a section in it is not a table.
    """
    name = str(path)
    if not path.exists() and name in shipped_names(_SHIPPED):
        return parse_toml(shipped_text(_SHIPPED, name), f"configuration {name}")
    if not path.exists() and (found := published(name)) is not None:
        return published_config(name, found)
    if path.is_dir():
        own = path / "config.toml"
        hint = f"that of this run is {own}" if own.is_file() else "name a .toml file"
        raise UserError(f"{path} is a directory, but a configuration is a file; {hint}")
    text = named_text("configuration", str(path), config_names())
    values = without_gone(parse_toml(text, f"configuration file {path}"))
    for section, table in values.items():
        if section in Config.model_fields and not isinstance(table, dict):
            first = next(iter(type(Config.model_fields[section].default).model_fields))
            example = f", as in {first} = {toml_value(table)}" if isinstance(table, str | int) else ""
            raise UserError(
                f"configuration file {path}: {section} = {table!r}, but it is a section; "
                f"write [{section}] above its keys{example}"
            )
    return values


# Keys that files of earlier runs have, each with the only value that it may have there; None: any.
_GONE = {
    "schedule.decay_steps": 0,
    "checkpoint.max_failures": None,
    "log.sample_tokens": None,
    "guard.raise_steps": math.inf,
    "guard.raise_budget": 4,
    "guard.lower_after": 0,
}


def without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """The tables of a file without keys that earlier versions wrote.

    Raises:
        UserError: one of them has a value that would change digits.
    """
    for name, only in _GONE.items():
        section, key = name.split(".")
        table = values.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        value = table.pop(key)
        if only is not None and value != only:
            raise UserError(f"{name} = {value!r}: this key is gone, and {only} is its value in every run now")
    return values


def config_keys() -> dict[str, Key]:
    """Every `section.key` with its description and default, for `--help` and for error messages."""
    return schema.keys_of({section: type(field.default) for section, field in Config.model_fields.items()})


# Pydantic's error types for text that it cannot parse, in words that show a valid form.
_RULES = {
    "int_parsing": "input should be a valid integer, as in 1000",
    "float_parsing": "input should be a valid number, as in 0.001 or 1e-3",
    "bool_parsing": "input should be a valid boolean, true or false",
}
_UNIONS = {"training.recompute": "selective", "training.graph": "auto"}


def _user_error(error: ValidationError) -> UserError:
    """The first pydantic error as a one-sentence `UserError`."""
    first = error.errors()[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
        return cause  # already complete
    where = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "extra_forbidden":
        if len(first["loc"]) == 1:
            above = [e for e in error.errors() if e["type"] == first["type"] and len(e["loc"]) == 1]
            found = {str(e["loc"][0]): e["input"] for e in above}
            if of_recipe := [key for key in (*GROUPS, "rule", "compute", "title") if key in found]:
                return UserError(
                    f"{of_recipe[0]!r} stands where a configuration has sections; if the file is a recipe, "
                    "name it by --recipe FILE, and else write its places below [recipe]"
                )
            if isinstance(first["input"], Mapping):
                return unknown("section", where, Config.model_fields)
            return outside(where, first["input"], config_keys())
        return unknown_key(where, config_keys())
    if where in _UNIONS:  # pydantic reports something else for each type of the union
        first |= {"type": "literal_error", "msg": f"input should be true, false or {_UNIONS[where]}"}
    rule = _RULES.get(first["type"]) or first["msg"][0].lower() + first["msg"][1:]
    see = f"see 'narrowgauge train --help {first['loc'][0]}'"
    return UserError(f"{where} = {first['input']!r}: {rule}; {see}")


def fitting_sizes(batch_size: int, dims: ParallelDims) -> list[int]:
    """The micro-batch sizes that fit, ascending; empty if the processes cannot have equal shares.

    >>> fitting_sizes(24, ParallelDims(shard=2))
    [1, 2, 3, 4, 6, 12]
    >>> fitting_sizes(24, ParallelDims(shard=2, pipeline=4, chunks=2))
    [1, 3]
    """
    share, rest = divmod(batch_size, dims.data)
    if rest:
        return []
    low = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
    counts = {size: share // size for size in {*low, *(share // n for n in low)}}
    return sorted(
        size
        for size, count in counts.items()
        if count >= dims.pipeline and (dims.chunks == 1 or count % dims.pipeline == 0)
    )


def largest_size(batch_size: int, dims: ParallelDims, most: int) -> int:
    """The largest size that fits, up to `most` sequences; `most` if none fits."""
    return max((size for size in fitting_sizes(batch_size, dims) if size <= most), default=most)


def held_out_sequences(training: schema.TrainingSection, batches: int) -> int:
    """The number of sequences of a validation of `batches` micro-batches of a single process.

    A micro-batch chosen smaller for several processes does not reduce it, so a validation uses the same text
    on any number of processes, and after a resume.
    """
    size = training.micro_batch_size
    if training.fit_micro_batch:
        most = schema.TrainingSection.model_fields["micro_batch_size"].default
        size = largest_size(training.batch_size, ParallelDims(), most)
    return batches * size


def next_batch_size(training: schema.TrainingSection, dims: ParallelDims) -> int:
    """The smallest batch of at least this size that fits, with this micro-batch if the user set it."""
    unit = dims.data * dims.pipeline * (1 if training.fit_micro_batch else training.micro_batch_size)
    return -(-training.batch_size // unit) * unit


def what_fits(training: schema.TrainingSection, dims: ParallelDims) -> str:
    """The keys and values that would fit, to end an error message."""
    micro, more = training.micro_batch_size, f"--training.batch_size {next_batch_size(training, dims)}"
    sizes = fitting_sizes(training.batch_size, dims)
    if not sizes:
        return f"set {more}"
    near = sorted(sorted(sizes, key=lambda size: abs(size - micro))[:4], reverse=True)
    listed = " or ".join(map(str, near))
    return f"set --training.micro_batch_size {listed}, leave it out and one is chosen, or set {more}"


def config_names() -> list[str]:
    """Sorted names of the configurations that ship."""
    return sorted({*shipped_names(_SHIPPED), *published_names()})


def published_config(name: str, found: Published, steps: int | None = None) -> Values:
    """The values of a published training; other than its steps shorten the warm-up to a tenth of them."""
    count, warmup = steps or found.steps, found.warmup_steps
    values: Values = {
        "model": {"name": name},
        "data": {"sequence_length": found.sequence_length},
        "training": {"steps": count, "batch_size": found.batch_size},
        "optimizer": {"lr": found.lr},
        "schedule": {
            "warmup_steps": warmup if count >= found.steps else max(1, min(warmup, count // 10)),
            "final_lr_fraction": found.final,
        },
    }
    if found.weight_decay is not None:
        values["optimizer"]["weight_decay"] = found.weight_decay
    return values


def with_published(values: Values) -> tuple[Values, str]:
    """The values, with missing keys from the model's published training, and a sentence about it.

    A model without one, or with a published training of which every key is given, leaves the values as they
    are, and the sentence is empty.
    """
    name = values.get("model", {}).get("name", "")
    if (found := published(name)) is None:
        return values, ""
    given = str(values.get("training", {}).get("steps", ""))
    steps = int(given) if given.isdecimal() else None
    defaults = published_config(name, found, steps)
    merged = {key: {**defaults.get(key, {}), **values.get(key, {})} for key in {**defaults, **values}}
    if merged == values:
        return values, ""
    note = f"; {found.note}" if found.note else ""
    return merged, f"what the line leaves out is as published: {found.source}{note}"

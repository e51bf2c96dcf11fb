"""The configuration of a run: one frozen tree, one level below the root, validated once, in sentences.

Values come from, later over earlier: the defaults below, a TOML file, `--section.key VALUE`. Both the file
and the command line end in `make_config`, so there is one set of names, one set of rules and one kind of
error. The defaults are the embedded run: a model of a few million parameters on Python's own source text.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from narrowgauge.data import AUTO, split_sources
from narrowgauge.errors import UserError, unknown
from narrowgauge.models import ModelConfig, model_config
from narrowgauge.optim import Kind
from narrowgauge.recipes import BACKENDS, KEYS, PLACES, Recipe, recipe
from narrowgauge.training.machine import bytes_of
from narrowgauge.training.toml_text import toml_key, toml_value

GAUGES_EVERY = 100  # by default; `benchmarks/gauges.py` measures what that takes


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_broken_text(cls, value: Any) -> Any:
        """Bytes of the command line that are no UTF-8 arrive as lone surrogates, which no file can hold."""
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise PydanticCustomError("not_utf8", "text must be UTF-8") from None
        return value


class _NamedModel(_Section):
    name: str = Field("debug", description="a named size, or custom where every dimension is given")
    weights: str = Field("", description="a run whose model and weights to start from")


_HINTS = get_type_hints(ModelConfig)
# [model] takes any dimension of the model; None means that of the named size.
ModelSection = create_model(
    "ModelSection",
    __base__=_NamedModel,
    **{f.name: (_HINTS[f.name] | None, Field(None, description="of the model")) for f in fields(ModelConfig)},  # type: ignore[call-overload]
)


_Weight = Annotated[float, Field(gt=0)]


class DataSection(_Section):
    """Where tokens come from."""

    source: str = Field(
        "stdlib",
        description="what `prepare` made or takes, or token files; several: commas between",
    )
    weights: tuple[_Weight, ...] = Field((), description="of the sources; none: as their numbers of tokens")
    tokenizer: str = Field(
        AUTO,
        description="bytes, bpe-N (learnt from the text), a file, or auto: the data's own, else bpe-4096",
    )
    sequence_length: int = Field(256, ge=2, description="tokens of a sequence")
    separate_documents: bool = Field(
        False, description="no attention and no loss from one document to the next in a sequence"
    )

    @field_validator("source", mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return (
            ",".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
        )

    @field_validator("weights", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) and value else value or ()


class TrainingSection(_Section):
    """How long, how much at once, where."""

    steps: int = Field(500, ge=1, description="optimizer steps")
    batch_size: int = Field(8, ge=1, lt=2**31, description="sequences per optimizer step")
    micro_batch_size: int = Field(8, ge=1, lt=2**31, description="sequences computed at once")
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, token order and stochastic rounding")
    device: str = Field("auto", description="auto, cpu or cuda")
    compile: bool = Field(False, description="run the model through torch.compile")
    recompute: bool = Field(False, description="keep only block inputs for backward, compute the rest again")
    memory_limit: str = Field("", description="of the device, as 24GB or 22GiB; empty: all it has")
    hang_timeout: float = Field(600.0, ge=0, description="seconds ranks wait for a hung one; 0: for ever")

    @field_validator("memory_limit")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        bytes_of(value)
        return value


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(_Section):
    """How weights move."""

    name: Literal["adamw", "muon"] = Field("adamw", description="adamw, or muon for hidden matrices")
    lr: float = Field(2e-3, gt=0, description="peak learning rate")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="decay of the two moments")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="of matrices")
    clip_norm: float = Field(
        1.0, gt=0, allow_inf_nan=True, description="largest global gradient norm; inf: no clipping"
    )

    momentum: float = Field(0.95, ge=0, lt=1, description="muon only: decay of the momentum")
    groups: Mapping[str, Mapping[str, float]] = Field(
        default_factory=dict, description="weight_decay and lr_factor by pattern of parameter names"
    )

    @field_validator("groups", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            raise PydanticCustomError(
                "no_json", 'on the command line it is JSON, as in {{"*.bias": {{"lr_factor": 2}}}}'
            ) from None

    @field_validator("betas", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        value = value.split(",") if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and len(value) != 2:
            raise PydanticCustomError("not_two", "there are two, as in 0.9,0.95")
        return value


class ScheduleSection(_Section):
    """The learning rate over time."""

    kind: Kind = Field("cosine", description="cosine, linear, wsd or constant")
    warmup_steps: int = Field(100, ge=0, description="steps of the linear rise")
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="share of the peak at the end")
    decay_fraction: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps that decay")
    decay_steps: int = Field(0, ge=0, description="the step at which the fall ends; 0: the last")


class RecipeSection(_Section):
    """Which format each place is in."""

    name: str = Field("fp8", description="a shipped recipe or a .toml file")
    backend: str = Field("auto", description=", ".join(BACKENDS))
    places: Mapping[str, Any] = Field(default_factory=dict, description="other casts in some places")

    @model_validator(mode="before")
    @classmethod
    def _gather_places(cls, values: Any) -> Any:
        """Every key but name and backend is a place: `"fprop.x" = "bf16"`, or fprop = {x = "bf16"}."""
        if not isinstance(values, dict):
            return values
        own = {k: v for k, v in values.items() if k in ("name", "backend")}
        if not isinstance(values.get("places", {}), Mapping):
            return values
        places = dict(values.get("places", {}))
        for key, value in values.items():
            if key in own or key == "places":
                continue
            if isinstance(value, dict) and "cast" not in value:
                places |= {f"{key}.{operand}": cast for operand, cast in value.items()}
            else:
                places[key] = value
        return own | {"places": places}


class ValidationSection(_Section):
    """Loss on held-out text."""

    every: int = Field(100, ge=1, description="steps between validations")
    batches: int = Field(8, ge=1, description="micro-batches of a validation")


class CheckpointSection(_Section):
    """What survives."""

    every: int = Field(100, ge=1, description="steps between saves")
    every_minutes: float = Field(
        10.0, gt=0, allow_inf_nan=True, description="minutes between saves, whichever comes first; inf: never"
    )
    keep: int = Field(2, ge=2, description="how many valid ones are kept")


class GuardSection(_Section):
    """When numbers go wrong."""

    max_skips: int = Field(10, ge=0, description="steps with a non-finite gradient in a row before it stops")


class GaugesSection(_Section):
    """What the recipe's numbers do to each place."""

    every: int = Field(
        GAUGES_EVERY, ge=0, description="steps between readings of every place; 0, or compile: none"
    )


class LogSection(_Section):
    """What is shown."""

    every: int = Field(10, ge=1, description="steps between plain progress lines")
    prompt: str = Field("", description="start of the sample at the end; empty: a fitting one")
    sample_tokens: int = Field(160, ge=1, description="length of that sample")


class Config(_Section):
    """Everything that defines a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    recipe: RecipeSection = RecipeSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    gauges: GaugesSection = GaugesSection()
    log: LogSection = LogSection()

    def gauges_every(self) -> int:
        """Steps between readings of the gauges, 0 for none; under compile only the number that was set."""
        is_default = "every" not in self.gauges.model_fields_set
        return 0 if self.training.compile and is_default else self.gauges.every

    def the_model(self) -> ModelConfig:
        """The model's dimensions: the named size with the section's other keys over it."""
        section = self.model.model_dump(exclude_none=True, exclude={"weights"})
        return model_config(**section)

    def the_recipe(self) -> Recipe:
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
    the_model = config.the_model()
    config.the_recipe()
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
        known = list(Config.model_fields) if len(first["loc"]) == 1 else list(config_keys())
        return unknown("section" if len(first["loc"]) == 1 else "key", where, known)
    rule = first["msg"][0].lower() + first["msg"][1:]
    return UserError(f"{where} = {first['input']!r}: {rule}; see 'narrowgauge train --help' for each key")


def to_toml(config: Config) -> str:
    """The whole configuration as TOML, resolved: it makes the same run again."""
    tables = config.model_dump()
    start = {"weights": config.model.weights} if config.model.weights else {}
    tables["model"] = {"name": config.model.name} | start | asdict(config.the_model())
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
    del tables["training"]["memory_limit"], tables["training"]["hang_timeout"]
    tables["recipe"].pop("offload", None)  # the numbers are the same wherever they lie
    beside = ("log", "checkpoint", "validation", "gauges")
    return {section: t for section, t in tables.items() if section not in beside}

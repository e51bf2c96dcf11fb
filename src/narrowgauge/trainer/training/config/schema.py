"""The sections of a configuration: their keys and defaults, the rule of each key, and its words in help.

This module checks single values. `config` checks their combinations and reads them.
"""

import json
import tomllib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from narrowgauge.guard.guard import GuardRules, Spike
from narrowgauge.optim import ScheduleKind
from narrowgauge.quantization import is_cast_table
from narrowgauge.recipes import BACKENDS, GROUPS
from narrowgauge.recipes.places import COMPUTE, PLACES
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.models import ModelConfig
from narrowgauge.trainer.training.config.synonyms import Key

GAUGES_EVERY = 100  # default; `benchmarks/gauges.py` measures its cost
_Weight = Annotated[float, Field(gt=0)]
_Decay = Annotated[float, Field(ge=0, lt=1)]


class Also(str):
    """The name of a key in other trainers, by which the command line finds it as well."""


class Metavar(str):
    """The form of a key's value in help, where the type does not say it."""


class Section(BaseModel):
    """A frozen table of keys, each with its rule and its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Read the text of a list, or JSON of a table, as the command line has them.

        Lone surrogates, bytes of the command line that are not UTF-8, cannot be stored in files. True and
        false are refused for numbers: pydantic would convert them to 1 and 0.
        """
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)} and bool not in get_args(kind):
            raise PydanticCustomError("not_a_number", "it is a number, not true or false")
        if not isinstance(value, str):
            return value
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise PydanticCustomError("not_utf8", "text must be UTF-8")
        if get_origin(kind) is tuple:
            return [part.strip() for part in value.split(",") if part.strip()]
        try:
            return json.loads(value) if get_origin(kind) is Mapping else value
        except json.JSONDecodeError:
            raise PydanticCustomError(
                "no_json", 'on the command line it is JSON, as in {"*.bias": {"lr_factor": 2}}'
            ) from None


class _NamedModel(Section):
    name: Annotated[str, Metavar("NAME")] = Field(
        "debug", description="a named size, or custom where every dimension is given"
    )
    weights: Annotated[str, Metavar("RUN")] = Field(
        "", description="a run whose model and weights to start from"
    )


# [model] takes any dimension of the model, as `ModelConfig` describes it; None: that of the named size.
ModelSection = create_model(
    "ModelSection",
    __base__=_NamedModel,
    **{  # type: ignore[call-overload]
        name: (hint.__origin__ | None, Field(None, description=hint.__metadata__[0]))
        for name, hint in get_type_hints(ModelConfig, include_extras=True).items()
    },
)


class DataSection(Section):
    """The source of the tokens."""

    source: Annotated[str, Also("dataset"), Metavar("SOURCE")] = Field(
        "stdlib", description="text, token files, what `prepare` made; commas between"
    )
    weights: tuple[_Weight, ...] = Field((), description="of the sources; none: as their numbers of tokens")
    tokenizer: Annotated[str, Metavar("bytes|bpe-N|FILE")] = Field(
        "auto",
        description="bytes, bpe-N (learnt from the text), a file, or auto: the data's own, else bpe-4096",
    )
    sequence_length: Annotated[int, Also("seq-len")] = Field(256, ge=2, description="tokens of a sequence")
    separate_documents: bool = Field(
        False, description="no attention and no loss from one document to the next in a sequence"
    )

    @field_validator("source", mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        is_list = isinstance(value, list) and all(isinstance(v, str) for v in value)
        return ",".join(value) if is_list else value


class TrainingSection(Section):
    """Length of the training, batch sizes and device."""

    steps: Annotated[int, Also("max-steps")] = Field(500, ge=1, description="optimizer steps")
    batch_size: Annotated[int, Also("global-batch-size")] = Field(
        8, ge=1, lt=2**31, description="sequences per optimizer step"
    )
    micro_batch_size: int = Field(8, ge=1, lt=2**31, description="sequences computed at once")
    fit_micro_batch: bool = True  # no key of a user's: whether the size above was chosen and not given
    seed: int = Field(0, ge=0, lt=2**63, description="for weights, token order and stochastic rounding")
    rounding_seed: int = Field(-1, ge=-1, lt=2**63, description="of stochastic rounding alone; -1: seed")
    device: Annotated[str, Metavar("auto|cpu|cuda")] = Field("auto", description="auto, cpu or cuda")
    threads: int = Field(0, ge=0, le=1024, description="of a CPU, for each process; 0: as many as are free")
    compile: bool = Field(False, description="run the model through torch.compile")
    graph: bool | Literal["auto"] = Field(
        "auto", description="micro-batches as CUDA graphs; auto: where make gpu saw the same digits"
    )
    deterministic: bool = Field(False, description="only kernels that repeat every bit on a GPU: slower")
    recompute: Annotated[bool | Literal["selective"], Also("gradient-checkpointing")] = Field(
        False, description="keep only block inputs for backward, compute the rest again; selective: the MLP"
    )
    recompute_every: int = Field(1, ge=1, description="with recompute: of every n-th block only")
    chunked_loss: bool = Field(False, description="head and loss a chunk of tokens at a time: less memory")
    z_loss: float = Field(0.0, ge=0, description="coefficient of the mean of logsumexp(logits)^2; 0: none")
    balance_loss: float = Field(0.01, ge=0, description="coefficient of the balance of experts; 0: none")
    memory_limit: Annotated[str, Metavar("SIZE")] = Field(
        "", description="limit per device, as in 24GB (all its memory)"
    )
    hang_timeout: float = Field(600.0, ge=0, description="seconds ranks wait for a hung one; 0: for ever")

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_given(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "micro_batch_size" in values:
            return {"fit_micro_batch": False, **values}
        return values

    @field_validator("memory_limit")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        parse_bytes(value)
        return value


class OptimizerSection(Section):
    """The optimizer."""

    name: Annotated[Literal["adamw", "muon"], Also("optimizer")] = Field("adamw", description="the rule")
    lr: Annotated[float, Also("learning-rate")] = Field(2e-3, gt=0, description="peak learning rate")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="decay of the two moments")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="of matrices")
    clip_norm: Annotated[float, Also("max-grad-norm")] = Field(
        1.0, gt=0, allow_inf_nan=True, description="largest global gradient norm; inf: no clipping"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="muon only: decay of the momentum")
    groups: Mapping[str, Mapping[str, float]] = Field(
        default_factory=dict, description="weight_decay and lr_factor by pattern of parameter names"
    )

    @field_validator("betas", mode="before")
    @classmethod
    def _are_two(cls, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and len(parts) != 2:
            raise PydanticCustomError("not_two", "there are two, as in 0.9,0.95")
        return value


class ScheduleSection(Section):
    """The learning rate over time."""

    kind: ScheduleKind = Field("cosine", description="cosine, linear, wsd or constant")
    warmup_steps: Annotated[int, Also("warmup-iters")] = Field(100, ge=0, description="steps of the rise")
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="share of the peak at the end")
    decay_fraction: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps that decay")


class RecipeSection(Section):
    """The recipe: the format of each place."""

    name: Annotated[str, Metavar("NAME|FILE")] = Field("fp8", description="a shipped recipe or a .toml file")
    backend: Annotated[str, Metavar("|".join(BACKENDS))] = Field("auto", description=", ".join(BACKENDS))
    places: Mapping[str, Any] = Field(default_factory=dict, description="other casts in some places")

    @model_validator(mode="before")
    @classmethod
    def _gather_places(cls, values: Any) -> Any:
        """Collect places, all keys but name and backend: `"fprop.x" = "bf16"`, or fprop = {x = "bf16"}.

        A group, as in wgrad = "bf16", stands for each of its places without a separate cast.
        """
        if not isinstance(values, dict) or not isinstance(values.get("places", {}), Mapping):
            return values
        named = {k: v for k, v in values.items() if k in ("name", "backend")}
        places = dict(values.get("places", {}))
        groups: dict[str, Any] = {}
        others = {k: v for k, v in values.items() if k not in ("name", "backend", "places")}
        for key, value in others.items():
            if isinstance(value, dict) and not is_cast_table(value):
                places |= {f"{key}.{operand}": cast for operand, cast in value.items()}
            elif key in GROUPS:
                groups |= dict.fromkeys(GROUPS[key], _table_of_text(key, value))
            else:
                places[key] = _table_of_text(key, value)
        return named | {"places": groups | places}


def _table_of_text(key: str, value: Any) -> Any:
    """Parse a text in braces, from the command line, as a table; return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return tomllib.loads(f"table = {value.strip()}")["table"]
    except tomllib.TOMLDecodeError:
        raise UserError(
            f"recipe.{key} = {value!r} is not a TOML table; put words in quotes and single quotes around "
            f"the whole, as in --recipe.{key} '{{cast = \"fp4-row\", outliers = 0.99}}'"
        ) from None


class ParallelSection(Section):
    """Number of processes along each axis; the product is the number of all processes."""

    replicate: int = Field(1, ge=1, description="whole weights on each, batches divided (DDP)")
    shard: int = Field(0, ge=0, description="weights cut, batches divided (FSDP2); 0: what is left")
    tensor: int = Field(1, ge=1, description="heads and hidden units divided, and tokens between them")
    pipeline: int = Field(1, ge=1, description="layers divided")
    context: int = Field(1, ge=1, description="tokens of each sequence divided")
    chunks: int = Field(1, ge=1, description="stages of each process of pipeline (interleaved 1F1B)")
    zero: int = Field(
        3, ge=0, le=3, description="what shard cuts: 1 moments, 2 gradients, 3 weights, 0 nothing"
    )
    expert: int = Field(1, ge=1, description="of shard's processes, this many have different experts")


class ValidationSection(Section):
    """Loss on held-out text."""

    every: Annotated[int, Also("eval-interval")] = Field(100, ge=1, description="steps between validations")
    batches: int = Field(8, ge=1, description="micro-batches of a validation")


class CheckpointSection(Section):
    """Checkpoints."""

    every: Annotated[int, Also("save-interval")] = Field(100, ge=1, description="steps between saves")
    every_minutes: float = Field(
        10.0, gt=0, allow_inf_nan=True, description="minutes between saves, whichever comes first; inf: never"
    )
    keep: int = Field(2, ge=2, description="how many valid ones are kept")
    asynchronous: bool = Field(
        False, description="write during the steps; they wait for a copy of the state in the host's memory"
    )


_RULES = GuardRules()


class GuardSection(Section):
    """Reactions to non-finite values and spikes, and checks for corruption."""

    max_skips: int = Field(_RULES.max_skips, ge=0, description="steps skipped in a row before it stops")
    spike: Spike = Field(
        _RULES.spike,
        description="of a loss or gradient norm far above the last ones: off, warn, skip, rollback or raise",
    )
    spike_factor: float = Field(
        _RULES.spike_factor, gt=0, description="deviations (loss) or times the median (norm) of a spike"
    )
    spike_window: int = Field(_RULES.spike_window, ge=4, description="steps that a spike is measured against")
    max_rollbacks: int = Field(_RULES.max_rollbacks, ge=0, description="rollbacks of a run before it stops")
    raise_to: str = Field(
        _RULES.raise_to,
        description="raise: the cast that an operand is widened to; empty: the recipe's compute format",
    )
    check_every: int = Field(
        _RULES.check_every,
        ge=0,
        description="steps between comparisons of replicas, besides those before a save; 0: only those",
    )
    replay_every: int = Field(
        _RULES.replay_every,
        ge=0,
        description="steps between one computed twice, which must agree in every bit; 0: never",
    )

    def rules(self) -> GuardRules:
        """The rules that these keys set."""
        return GuardRules(**self.model_dump())


class GaugesSection(Section):
    """Readings of the quantization error at each place."""

    every: int = Field(
        GAUGES_EVERY,
        ge=0,
        description="steps between readings of every place, besides the last step; 0, or compile: none",
    )


class LogSection(Section):
    """Progress output, the final sample and the sinks."""

    every: int = Field(10, ge=1, description="steps between plain progress lines")
    prompt: str = Field("", description="start of the sample at the end; empty: a fitting one")
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="where else metrics and gauges go: tensorboard, wandb, trackio"
    )


def keys_of(sections: Mapping[str, type[Section]]) -> dict[str, Key]:
    """Every `section.key` that has a description; the places of a recipe are keys of its section."""
    keys: dict[str, Key] = {}
    for section, table in sections.items():
        for name, field in table.model_fields.items():
            if (section, name) == ("recipe", "places"):
                keys |= _place_keys()
            elif field.description:
                alias, metavar = (
                    next((str(note) for note in field.metadata if isinstance(note, kind)), "")
                    for kind in (Also, Metavar)
                )
                metavar = metavar or _metavar(field.annotation)
                keys[f"{section}.{name}"] = Key(str(field.description), _default(field), metavar, alias)
    return keys


def _place_keys() -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for place in PLACES:
        group = place.partition(".")[0]
        if group in GROUPS:
            words = f"the cast of {', '.join(GROUPS[group])}"
            keys.setdefault(f"recipe.{group}", Key(words, "", "CAST"))
        keys[f"recipe.{place}"] = Key("the cast of this place", "", "CAST")
    keys["recipe.offload"] = Key("of master, grad, m, v: those in the host's memory (none)", "", "PLACE,...")
    keys["recipe.keep"] = Key("layers in compute instead of the recipe's own (none)", "", "NAME,...")
    keys["recipe.compute"] = Key("of matmuls and of all that is not narrow", "", "|".join(COMPUTE))
    return keys


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or value == {} else str(value)


def _metavar(kind: Any) -> str:
    """The form of a value of this type on the command line."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return "|".join(_metavar(part) for part in inside if part is not NoneType)
    if origin is Annotated:
        return _metavar(inside[0])
    if origin is Literal:
        return "|".join(inside)
    if origin is tuple:
        return ",".join("..." if part is Ellipsis else _metavar(part) for part in inside)
    if isinstance(kind, type) and issubclass(kind, bool):
        return "true|false"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "JSON")

"""How a tensor is quantized, as a record: a `Cast`.

    x  ~  element(code) * scale(block) * outer scale

A cast is an element format, a block, and a list of stages (`stages/`), each a record with its rules:

    scales      the scale of each block, and the outer scale   all quantized casts
    rounding    to nearest, stochastic, toward zero
    choice      the best of several candidates for each block  nvfp4-4over6
    channels, mean, hadamard, clamp                            applied before blocks get scales
    amax        the steps that an amax comes from              delayed scaling
    estimator   the gradient through the rounding of a weight
    state       options of weights, gradients and moments

FP8 is an element and fp32 scales; MXFP8 adds a block of 32 and E8M0 scales; NVFP4 has E4M3 scales of 16
elements under an outer scale of the tensor. A stage at its defaults does nothing. A recipe's table has flat
keys, which `Cast.from_keys` and `Cast.having` accept. The named casts are data in `named_casts.py`; the rules
that relate two stages are in `cast_rules.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from narrowgauge.formats import Format, format
from narrowgauge.once import compute_all
from narrowgauge.quantization.cast_rules import require_valid
from narrowgauge.quantization.stages import Stage, Transform
from narrowgauge.quantization.stages.amax import AmaxOverTime
from narrowgauge.quantization.stages.channels import Channels
from narrowgauge.quantization.stages.choice import Choice
from narrowgauge.quantization.stages.clamp import Clamp
from narrowgauge.quantization.stages.hadamard import Hadamard
from narrowgauge.quantization.stages.mean import Mean
from narrowgauge.quantization.stages.rounding import Estimator, Rounding
from narrowgauge.quantization.stages.scales import Scales
from narrowgauge.quantization.stages.state import StateFormat

#: Keys that only affect the codes and scales that `quantize` stores; a caller of `quantize` supports them
#: all.
CODES_AND_SCALES = ("element", "block", *Scales.KEYS, *Rounding.KEYS, "candidates", "choose")
#: Keys that quantized state implements (`state.quantized_state`).
STATE_KEYS = (*CODES_AND_SCALES, *StateFormat.KEYS)
#: Keys that a layer implements around its casts: where an operand, its scale, its kept channels or its
#: gradient comes from.
BY_LAYER = ("of", *AmaxOverTime.KEYS, *Estimator.KEYS, "keep_cast", "keep_steps", "keep_every")
_ON_NO_AXIS = (*STATE_KEYS, *BY_LAYER, "signs", *Mean.KEYS, "compensate")
_WRITTEN = (  # the order in which keys are written
    *("element", "scale", "tensor_scale", "scale_target", "scale_rounding", "zero_scale"),
    *("candidates", "choose", "feedback", "of"),
    *("keep_channels", "keep_cast", "keep_steps", "keep_every", "refresh", "center", "center_cast"),
    *("correct", "block", "scale_rule", "rounding", "hadamard", "headroom", "power_of_two", "signs"),
    *("random_bits", "history", "history_algorithm", "margin", "outliers", "compensate"),
    *("expand", "codebook", "prescale", "estimator_k", "estimator_cap", "function"),
)
_SCALES, _CHOICE, _ROUNDING, _CHANNELS, _MEAN = Scales(), Choice(), Rounding(), Channels(), Mean()
_HADAMARD, _CLAMP, _AMAX, _ESTIMATOR, _STATE = Hadamard(), Clamp(), AmaxOverTime(), Estimator(), StateFormat()


@dataclass(frozen=True, kw_only=True)
class Cast:
    """One way to store a tensor in low precision.

    Attributes:
        name: The name of the named cast that it is, or is made from; else its element, block and scale.
        element: The format of the elements.
        block: (rows, columns) that share a scale, columns along the axis that a GEMM contracts, 0 for all of
            them; None for the full tensor.
        scales: The scales of blocks; without them a cast is a plain conversion (bf16, fp16, fp32).
        rounding: How elements are rounded.
        choice: The candidates of a block.
        channels: The channels that are kept in another cast.
        mean: The mean over tokens that is quantized separately.
        hadamard: The Hadamard transform along the contraction.
        clamp: The clamp of outliers.
        amax: The steps that an amax comes from.
        estimator: The gradient through the rounding of a weight.
        state: The storage of state.
        of: The place whose values are used instead of the tensor's own, such as "fprop.w".
        function: The name of a custom function that gives the values (`register_cast`); "" for none.
    """

    name: str
    element: Format
    block: tuple[int, int] | None = None
    scales: Scales = _SCALES
    rounding: Rounding = _ROUNDING
    choice: Choice = _CHOICE
    channels: Channels = _CHANNELS
    mean: Mean = _MEAN
    hadamard: Hadamard = _HADAMARD
    clamp: Clamp = _CLAMP
    amax: AmaxOverTime = _AMAX
    estimator: Estimator = _ESTIMATOR
    state: StateFormat = _STATE
    of: str = ""
    function: str = ""

    def __post_init__(self) -> None:
        require_valid(self)
        compute_all(self)

    def __repr__(self) -> str:
        values = self.values()
        shown = ((key, values[key]) for key in self.beyond(()))
        keys = (f"{key}={v.name if isinstance(v, Format) else repr(v)}" for key, v in shown)
        return f"Cast({', '.join([repr(self.name), *keys])})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_hash"}  # valid in one process

    def beyond(self, known: Collection[str]) -> tuple[str, ...]:
        """The keys that are not at their defaults, except those in `known`.

        A consumer lists the keys it implements and refuses everything beyond them, so it also refuses every
        key that is added to casts later.
        """
        return tuple([key for key in self.changed_keys if key not in known])

    @cached_property
    def changed_keys(self) -> tuple[str, ...]:
        """The keys that are not at their defaults, in the order in which casts are written."""
        defaults = self.defaults()
        return tuple(key for key, value in self.values().items() if value != defaults[key])

    @classmethod
    def from_keys(cls, name: str, **keys: Any) -> "Cast":
        """A cast from a name and some flat keys; all others are at their defaults."""
        return cls(name=name, **_grouped(cls, {}, keys))

    def having(self, **keys: Any) -> "Cast":
        """A copy with other values for some flat keys, or another name."""
        stages = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **_grouped(type(self), stages, keys))

    def values(self) -> dict[str, Any]:
        """The value of each key that a recipe's table can have, in the order in which casts are written."""
        return dict(self._values)

    @cached_property
    def _values(self) -> dict[str, Any]:
        return _flat({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    @cache
    def defaults(cls) -> MappingProxyType[str, Any]:
        """The default of each key; `MISSING` for the element."""
        return MappingProxyType(_flat({f.name: f.default for f in fields(cls)}))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, including those at their defaults, in the order in which transforms are applied."""
        return tuple(v for f in fields(self) if isinstance(v := getattr(self, f.name), Stage))

    @cached_property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms applied to a tensor before its blocks get scales, in order."""
        return tuple(s for s in self.stages if isinstance(s, Transform) and s != type(s)())

    @cached_property
    def is_scaled(self) -> bool:
        """Whether elements are stored with scales."""
        return self.scales.format != "none"

    @cached_property
    def is_for_state(self) -> bool:
        """Whether only state can use it: its elements are wider than a byte, or expanded."""
        is_wide = self.element.bits > 8 or self.state.expand or bool(self.state.codebook)
        return self.is_scaled and (is_wide or self.state.prescale)

    @cached_property
    def ignores_axis(self) -> bool:
        """Whether the values are the same whichever axis is contracted (no block, or a square one)."""
        is_square = self.block is None or self.block[0] == self.block[1]
        return is_square and not self.scales.by_row and not self.beyond(_ON_NO_AXIS)

    @cached_property
    def is_random(self) -> bool:
        """Whether elements or scales are rounded stochastically."""
        return "stochastic" in (self.rounding.mode, self.scales.rounding)

    @cached_property
    def target(self) -> float:
        """The target of the largest block scale under an outer scale."""
        return self.scales.target or (256.0 if self.choice.candidates else 448.0)

    @cached_property
    def aim(self) -> float:
        """The magnitude, in units of the scale, that a block's amax is mapped to."""
        return self.element.max * self.scales.headroom

    @cached_property
    def to_nearest(self) -> "Cast":
        """The cast with elements and scales rounded to nearest."""
        changes = {"rounding": "nearest-even", "scale_rounding": "nearest-even"}
        return self.having(**changes) if self.is_random else self

    @cached_property
    def of_the_rest(self) -> "Cast":
        """The cast of the channels that are not kept in another one."""
        return self if self.channels == _CHANNELS else replace(self, channels=_CHANNELS)

    @cached_property
    def uncorrected(self) -> "Cast":
        """The cast whose scales a correction starts from."""
        return self.having(scale_rounding="nearest-even", correct="") if self.scales.correction else self

    @cached_property
    def adds_to_operand(self) -> bool:
        """Whether the operand is multiplied or added to once more, in float32."""
        return self.clamp.adds_back or self.scales.by_row or bool(self.mean.over)

    @cached_property
    def scales_result(self) -> bool:
        """Whether `emulate` returns a separate tensor scale, to be applied to the GEMM's result."""
        is_apart = self.adds_to_operand or bool(self.channels.share)
        return self.is_scaled and not is_apart and (self.block is None or self.scales.outer == "tensor")

    @cached_property
    def has_wide_operand(self) -> bool:
        """Whether `emulate` returns an operand in float32, because bfloat16 would round it."""
        if not self.is_scaled:
            return self.element.bits > 16
        if self.channels.share and (self.block is None or self.scales.outer == "tensor"):
            return True
        if self.block is None or self.adds_to_operand:
            return self.adds_to_operand
        if self.scales.format == "fp32":
            return not self.scales.power_of_two
        bits, scale_bits = self.element.fraction_bits + 1, format(self.scales.format).mantissa_bits + 1
        return bits + (scale_bits if scale_bits > 1 else 0) > 8


def _flat(of_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each flat key, in the order in which casts are written."""
    found: dict[str, Any] = {}
    for name, value in of_fields.items():
        if name != "name":
            found |= value.values() if isinstance(value, Stage) else {name: value}
    return {key: found.pop(key) for key in _WRITTEN} | found


def _grouped(cls: type[Cast], stages: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cast from flat keys: a stage is the one in `stages`, or its default, changed."""
    found = dict(keys)
    for f in fields(cls):
        of_stage = f.default.KEYS if isinstance(f.default, Stage) else {}
        changes = {attribute: found.pop(key) for key, attribute in of_stage.items() if key in found}
        if changes:
            found[f.name] = replace(stages.get(f.name, f.default), **changes)
    return found

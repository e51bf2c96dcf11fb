"""How a tensor becomes narrow numbers, as a record: a `Cast`.

A cast is an element format, a block, a scale and a rounding:

    x  ~  element(code) * scale(block) * tensor_scale

and the stages that a tensor goes through before (`stages/`), each a record that is at its defaults where a
cast does not have it. A recipe's table has flat keys; `Cast.from_keys` and `Cast.having` take those.

The block is (rows, columns) with columns along the axis that a GEMM contracts; None is the full tensor, and
a 0 means "the full extent". A cast without a scale is a plain conversion (bf16, fp16, fp32). The casts that
have a name are data in `named_casts.py`, what does not fit together is in `cast_rules.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from narrowgauge.formats import RANDOM_BITS, Format, format
from narrowgauge.once import compute_all, computed_once
from narrowgauge.quantization.cast_rules import ROUNDED_SCALES, require_valid
from narrowgauge.quantization.stages.channels import Channels
from narrowgauge.quantization.stages.clamp import Clamp
from narrowgauge.quantization.stages.hadamard import Hadamard
from narrowgauge.quantization.stages.mean import Mean
from narrowgauge.quantization.stages.stage import Stage, Transform

#: Keys whose whole effect is which codes and scales `quantize` stores: who quantizes by it and reads those
#: implements them.
CODES_AND_SCALES = (
    *("element", "block", "scale", "scale_rule", "power_of_two", "headroom", "rounding", "random_bits"),
    *("tensor_scale", "scale_target", "scale_rounding", "zero_scale", "candidates", "choose", "correct"),
)
#: Keys that quantized state implements (`state.quantized_state`).
STATE_KEYS = (*CODES_AND_SCALES, "expand", "codebook", "split", "prescale", "feedback")
#: Keys that a layer implements around its casts: where an operand, its scale, its kept channels or its
#: gradient comes from.
BY_LAYER = (
    *("of", "history", "history_algorithm", "margin", "refresh", "estimator_k", "estimator_cap"),
    *("keep_cast", "keep_steps", "keep_every"),
)
#: Keys that are not written with the others of their stage.
_WRITTEN_AFTER = {"signs": "power_of_two"}
_CHANNELS, _MEAN, _HADAMARD, _CLAMP = Channels(), Mean(), Hadamard(), Clamp()  # of a cast without them


@dataclass(frozen=True, kw_only=True)
class Cast:
    """One way to store a tensor in narrow numbers.

    Attributes:
        name: The name of the named cast that it is, or is made from; else its element, block and scale.
        element: The format of the elements.
        scale: "none" (plain conversion), or the format of the scales: "fp32", "bf16", "e8m0" (OCP MX),
            "e4m3", "e5m3" (UE5M3).
        tensor_scale: "none", or a second scale in fp32: one a "tensor" (NVFP4), one a "row" of an operand, or
            one for so many columns of a row, such as "128".
        scale_target: What the largest block scale aims at under a tensor scale; 0 stands for 448, with
            candidates for 256.
        scale_rounding: How scales in bf16, e4m3 and e5m3 are rounded: a name of `formats.ROUNDINGS`.
        zero_scale: What a scale that rounds to 0 becomes: "one" or "zero" (the block is zeros), "smallest"
            (the smallest positive number); "" stands for "zero" in NVFP4, else for "one".
        candidates: Element magnitudes, such as (6, 4), that a block's largest number may be mapped to; () for
            the largest element only. Each block is quantized with all of them.
        elements: Two element formats, such as ("e2m1", "int4"), of which each block has one: the first is
            `element`, which scales aim at; numbers of the second are stretched to the same range. () for one.
        choose: The error by which one of them is chosen: "mae" or "mse" (mean of its absolute or squared
            errors), or "max" (its largest error); the first of equals.
        refresh: 0 takes the largest magnitude under a tensor scale from the tensor itself; n takes it once
            in n steps, and holds it in between.
        mean: The mean over tokens that is quantized apart (`center`).
        correct: "projection" multiplies the scales of a Hadamard group (of a block, without a transform) by
            what makes the projection of its numbers on themselves exact (MS-EDEN), before they are rounded
            by `scale_rounding`; elements are those under the nearest scale. "" does not.
        feedback: "momentum" puts what rounding takes from a weight that has no master into the first moment
            (ECO; `optim.feedback`); "" does not.
        of: The place whose numbers are taken in place of the tensor's, such as "fprop.w".
        channels: The channels that are kept in another cast (`keep_channels` and its like in a recipe).
        block: (rows, columns) that share a scale, columns along the contraction axis; None = the full tensor.
        scale_rule: How the power of two of "e8m0" is chosen: "floor" | "ceil" | "even" | "rceil".
        rounding: A name of `formats.ROUNDINGS`.
        hadamard: The Hadamard transform along the contraction (`hadamard`, `signs`).
        headroom: The share of the largest element that scales aim at. 16/17 makes NVFP4 free of clipping,
            because rounding a scale to E4M3 lowers it by at most 1/17; above 1, the largest are clipped.
        power_of_two: Whether an "fp32" encoding scale is cut to its power of two.
        random_bits: Random bits an element of stochastic rounding: 24 is unbiased, 8 is what sm_100 does.
        history: 0 takes a tensor's scale from the tensor itself, n from its largest magnitudes in the last
            n steps (delayed scaling).
        history_algorithm: "max" of the history, or its "most_recent" entry.
        margin: With a history, the binades that are left free above the largest magnitude.
        clamp: The clamp of outliers (`outliers`, `compensate`).
        expand: Whether each block is stretched to the format's full range first (COAT; state only).
        codebook: A table of numbers that codes index, "dynamic" or "dynamic-unsigned" (state only); the
            element then only says how wide a code is.
        split: Whether 16 more bits for each bf16 element make it float32 again (state only).
        prescale: Whether the scale of a stored gradient is multiplied by a factor that learns how much room
            is needed.
        estimator_k: 0, or the k of the differentiable gradient estimator of a weight.
        estimator_cap: The largest slope that the estimator gives.
    """

    name: str
    element: Format
    scale: str = "none"
    tensor_scale: str = "none"
    scale_target: float = 0.0
    scale_rounding: str = "nearest-even"
    zero_scale: str = ""
    candidates: tuple[float, ...] = ()
    elements: tuple[str, ...] = ()
    choose: str = ""
    feedback: str = ""
    of: str = ""
    channels: Channels = _CHANNELS
    refresh: int = 0
    mean: Mean = _MEAN
    correct: str = ""
    block: tuple[int, int] | None = None
    scale_rule: str | None = None
    rounding: str = "nearest-even"
    hadamard: Hadamard = _HADAMARD
    headroom: float = 1.0
    power_of_two: bool = False
    random_bits: int = RANDOM_BITS
    history: int = 0
    history_algorithm: str = "max"
    margin: int = 0
    clamp: Clamp = _CLAMP
    expand: bool = False
    codebook: str = ""
    split: bool = False
    prescale: bool = False
    estimator_k: float = 0.0
    estimator_cap: float = 3.0

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

    @computed_once
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_hash"}  # of this process

    def beyond(self, known: Collection[str]) -> tuple[str, ...]:
        """The keys that are not at their defaults, without those in `known`.

        A consumer that lists the keys it implements, and refuses what is beyond them, also refuses every key
        that is added to casts later.
        """
        return tuple([key for key in self.changed_keys if key not in known])

    @computed_once
    def changed_keys(self) -> tuple[str, ...]:
        """The keys that are not at their defaults, in the order in which casts are written."""
        defaults = self.defaults()
        return tuple(key for key, value in self.values().items() if value != defaults[key])

    @classmethod
    def from_keys(cls, name: str, **keys: Any) -> "Cast":
        """The cast of a name and some flat keys; all others are at their defaults."""
        return cls(name=name, **_grouped(cls, {}, keys))

    def having(self, **keys: Any) -> "Cast":
        """The same cast with other values of some flat keys, or another name."""
        stages = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **_grouped(type(self), stages, keys))

    def values(self) -> dict[str, Any]:
        """The value of each key that a recipe's table can have, in the order in which casts are written."""
        found: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "name":
                found |= value.values() if isinstance(value, Stage) else {f.name: value}
        keys = [key for key in found if key not in _WRITTEN_AFTER]
        for key, other in _WRITTEN_AFTER.items():
            keys.insert(keys.index(other) + 1, key)
        return {key: found[key] for key in keys}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of each key; `MISSING` for the element."""
        found: dict[str, Any] = {}
        for f in fields(cls):
            if f.name != "name":
                found |= f.default.values() if isinstance(f.default, Stage) else {f.name: f.default}
        return found

    @computed_once
    def stages(self) -> tuple[Stage, ...]:
        """The stages that the cast has."""
        values = [(f.default, getattr(self, f.name)) for f in fields(self)]
        return tuple(value for default, value in values if isinstance(value, Stage) and value != default)

    @computed_once
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms that a tensor goes through before its blocks get scales, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, Transform))

    @computed_once
    def is_scaled(self) -> bool:
        """Whether elements are stored with scales."""
        return self.scale != "none"

    @computed_once
    def is_for_state(self) -> bool:
        """Whether only state can have it: its elements are wider than a byte, or stretched, or split."""
        is_wide = self.element.bits > 8 or self.expand or bool(self.codebook) or self.prescale
        return self.split or (self.is_scaled and is_wide)

    @computed_once
    def ignores_axis(self) -> bool:
        """Whether the numbers are the same whichever axis is contracted (no block, or a square one)."""
        is_square = self.block is None or self.block[0] == self.block[1]
        return is_square and not self.is_scaled_by_row and not self.beyond(_ON_NO_AXIS)

    @computed_once
    def has_scale_codes(self) -> bool:
        """Whether a scale is stored as a code of a byte."""
        return self.is_scaled and format(self.scale).bits == 8

    @computed_once
    def is_random(self) -> bool:
        """Whether elements or scales are rounded stochastically."""
        return "stochastic" in (self.rounding, self.scale_rounding)

    @computed_once
    def is_nvfp4(self) -> bool:
        """Whether scales follow TransformerEngine's arithmetic for NVFP4: E4M3 under a second scale."""
        return self.scale == "e4m3" and self.tensor_scale != "none"

    @computed_once
    def is_scaled_by_row(self) -> bool:
        """Whether there are second scales of rows, or of some columns of a row."""
        return self.tensor_scale not in ("none", "tensor")

    @computed_once
    def columns_above(self) -> int:
        """The columns of a row that share a second scale; 0 for all of them."""
        return int(self.tensor_scale) if self.tensor_scale.isdigit() else 0

    @computed_once
    def has_rounded_scale(self) -> bool:
        """Whether a block's scale is a quotient that is rounded to a format: elements are divided by it."""
        return self.scale in ROUNDED_SCALES and not self.is_nvfp4

    @computed_once
    def target(self) -> float:
        """What the largest block scale aims at under a tensor scale."""
        return self.scale_target or (256.0 if self.candidates else 448.0)

    @computed_once
    def aim(self) -> float:
        """The magnitude, in units of the scale, that the largest of a block aims at."""
        return self.element.max * self.headroom

    @property
    def with_second(self) -> "Cast":
        """The cast of the blocks that have the second of `elements`."""
        return replace(self, element=format(self.elements[1]), elements=(), choose="")

    @property
    def with_nearest_scales(self) -> "Cast":
        """The cast whose scales `correct` corrects: rounded to nearest."""
        return replace(self, scale_rounding="nearest-even", correct="") if self.correct else self

    @property
    def of_the_rest(self) -> "Cast":
        """The cast of the channels that are not kept in `keep_cast`."""
        return replace(self, channels=_CHANNELS)

    @property
    def stretch(self) -> tuple[float, float]:
        """What numbers of the second of `elements` are multiplied by before they are rounded, and after."""
        first, second = (format(name).max for name in self.elements)
        return second / first, first / second

    @computed_once
    def zero_rule(self) -> str:
        """What a scale that rounds to 0 becomes: one of `ZERO_SCALES`."""
        return self.zero_scale or ("zero" if self.is_nvfp4 else "one")

    @property
    def is_exact_in_bf16(self) -> bool:
        """Whether bfloat16 holds every product of an element and its block's scale."""
        if self.elements:
            return False
        if self.scale == "fp32":
            return self.power_of_two
        bits, scale_bits = self.element.fraction_bits + 1, format(self.scale).mantissa_bits + 1
        return bits + (scale_bits if scale_bits > 1 else 0) <= 8

    @computed_once
    def adds_to_operand(self) -> bool:
        """Whether something is multiplied by or added to the operand once more, in float32."""
        return self.clamp.adds_back or self.is_scaled_by_row or bool(self.mean.over)

    @computed_once
    def scales_result(self) -> bool:
        """Whether `emulate` gives a tensor's scale apart, to be applied to the result of the product."""
        is_apart = self.adds_to_operand or bool(self.channels.share)
        return self.is_scaled and not is_apart and (self.block is None or self.tensor_scale == "tensor")

    @computed_once
    def has_wide_operand(self) -> bool:
        """Whether `emulate` gives an operand in float32, because bfloat16 would round it."""
        if not self.is_scaled:
            return self.element.bits > 16
        if self.channels.share and (self.block is None or self.tensor_scale == "tensor"):
            return True
        return self.adds_to_operand or not (self.block is None or self.is_exact_in_bf16)


def _grouped(cls: type[Cast], stages: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cast that flat keys give; a stage is the one in `stages`, or its default, changed."""
    found = dict(keys)
    for f in fields(cls):
        of_stage = f.default.KEYS if isinstance(f.default, Stage) else {}
        changes = {attribute: found.pop(key) for key, attribute in of_stage.items() if key in found}
        if changes:
            found[f.name] = replace(stages.get(f.name, f.default), **changes)
    return found


#: Keys under which numbers do not depend on the axis, if the block does not.
_ON_NO_AXIS = (
    *(*CODES_AND_SCALES, *BY_LAYER, "elements", "signs", "center", "center_cast", "compensate", "feedback"),
    *("expand", "codebook", "split", "prescale"),
)

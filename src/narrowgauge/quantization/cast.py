"""How a tensor is quantized, as a record: a `Cast`.

    x  ~  element(code) * scale(block) * outer scale

A cast is a name and the keys of `keys.py`: an element format, a block, the scales of blocks and the outer
scale, how both are rounded, candidates for each block, what happens to the tensor before its blocks get
scales (kept channels, mean, Hadamard transform, clamp), the steps that an amax comes from (delayed scaling),
the gradient through the rounding of a weight, and options of state. A key at its default does nothing.

FP8 is an element and fp32 scales; MXFP8 adds a block of 32 and E8M0 scales; NVFP4 has E4M3 scales of 16
elements under an outer scale of the tensor. The named casts are data in `named_casts.py`.
"""

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from operator import ge
from types import MappingProxyType
from typing import Any

from narrowgauge.formats import Format, format
from narrowgauge.quantization.keys import KEYS, ROUNDED, Consumer, Keys, require_valid
from narrowgauge.system.lazy import compute_all


@dataclass(frozen=True, kw_only=True)
class Cast(Keys):
    """One way to store a tensor in low precision.

    Attributes:
        name: The name of the named cast that it is, or is made from; else its element, block and scale.
    """

    name: str

    def __post_init__(self) -> None:
        require_valid(self)
        compute_all(self)

    def __repr__(self) -> str:
        shown = {key: getattr(self, key) for key in self.changed_keys}
        keys = (f"{key}={v.name if isinstance(v, Format) else repr(v)}" for key, v in shown.items())
        return f"Cast({', '.join([repr(self.name), *keys])})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, *self.values().values()))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_hash", "in_c")}  # valid in one process

    @cached_property
    def unsupported(self) -> dict[Consumer, tuple[str, ...]]:
        """The keys that are not at their defaults, and that each consumer does not support."""
        return {c: tuple(k for k in self.changed_keys if c not in KEYS[k].consumers) for c in Consumer}

    @cached_property
    def changed_keys(self) -> tuple[str, ...]:
        """The keys that are not at their defaults, in the order in which casts are written."""
        defaults = self.defaults()
        return tuple(key for key, value in self.values().items() if value != defaults[key])

    def having(self, **keys: Any) -> "Cast":
        """A copy with other values for some keys, or another name."""
        return replace(self, **keys)

    def values(self) -> dict[str, Any]:
        """The value of each key that a recipe's table can have, in the order in which casts are written."""
        return {key: getattr(self, key) for key in self.defaults()}

    @classmethod
    @cache
    def defaults(cls) -> MappingProxyType[str, Any]:
        """The default of each key; `MISSING` for the element."""
        return MappingProxyType({f.name: f.default for f in fields(Keys)})

    @cached_property
    def is_scaled(self) -> bool:
        """Whether elements are stored with scales."""
        return self.scale != "none"

    @cached_property
    def has_coded_scales(self) -> bool:
        """Whether a block scale is stored as a one-byte code."""
        return self.scale in ("e8m0", "e4m3", "e5m3")

    @cached_property
    def has_nvfp4_scales(self) -> bool:
        """Whether scales follow TransformerEngine's arithmetic for NVFP4: E4M3 under an outer scale."""
        return self.scale == "e4m3" and self.tensor_scale != "none"

    @cached_property
    def has_rounded_scales(self) -> bool:
        """Whether a block scale is a quotient rounded to a format, by which elements are divided."""
        return self.scale in ROUNDED and not self.has_nvfp4_scales

    @cached_property
    def has_row_scales(self) -> bool:
        """Whether there is an outer scale for each row, or for groups of columns in a row."""
        return self.tensor_scale not in ("none", "tensor")

    @cached_property
    def outer_columns(self) -> int:
        """The columns of a row that share an outer scale; 0 for all of them."""
        return int(self.tensor_scale) if self.tensor_scale.isdigit() else 0

    @cached_property
    def zero_rule(self) -> str:
        """What a scale that rounds to 0 becomes: "one", "zero" or "smallest"."""
        return self.zero_scale or ("zero" if self.has_nvfp4_scales else "one")

    @cached_property
    def is_transformed(self) -> bool:
        """Whether a tensor is changed before its blocks get scales."""
        return bool(self.center or self.hadamard or self.signs or self.outliers or self.compensate)

    @cached_property
    def is_for_state(self) -> bool:
        """Whether only state can use it: its elements are wider than a byte, or expanded."""
        is_wide = self.element.bits > 8 or self.expand or bool(self.codebook)
        return self.is_scaled and (is_wide or self.prescale)

    @cached_property
    def ignores_axis(self) -> bool:
        """Whether the values are the same whichever axis is contracted (no block, or a square one)."""
        is_square = self.block is None or self.block[0] == self.block[1]
        return is_square and not self.has_row_scales and not self.unsupported[Consumer.ANY_AXIS]

    @cached_property
    def is_random(self) -> bool:
        """Whether elements or scales are rounded stochastically."""
        return "stochastic" in (self.rounding, self.scale_rounding)

    @cached_property
    def target(self) -> float:
        """The target of the largest block scale under an outer scale."""
        return self.scale_target or (256.0 if self.candidates else 448.0)

    @cached_property
    def aim(self) -> float:
        """The magnitude, in units of the scale, that a block's amax is mapped to."""
        return self.element.max * self.headroom

    @cached_property
    def to_nearest(self) -> "Cast":
        """The cast with elements and scales rounded to nearest."""
        nearest = "nearest-even"
        return self.having(rounding=nearest, scale_rounding=nearest) if self.is_random else self

    @cached_property
    def of_the_rest(self) -> "Cast":
        """The cast of the channels that are not kept in another one."""
        keys = ("keep_channels", "keep_cast", "keep_steps", "keep_every")
        return self.having(**{key: self.defaults()[key] for key in keys}) if self.keep_cast else self

    @cached_property
    def uncorrected(self) -> "Cast":
        """The cast whose scales a correction starts from."""
        return self.having(scale_rounding="nearest-even", correct="") if self.correct else self

    @cached_property
    def adds_to_operand(self) -> bool:
        """Whether the operand is multiplied or added to once more, in float32."""
        return self.compensate or self.has_row_scales or bool(self.center)

    @cached_property
    def held_in(self) -> tuple[str, ...]:
        """The formats of 16 bits that have every value of its elements."""
        return tuple(f for f in ("bf16", "fp16") if all(map(ge, format(f).extent, self.element.extent)))

    @cached_property
    def scales_result(self) -> bool:
        """Whether `emulate` returns a separate tensor scale, to be applied to the GEMM's result."""
        is_apart = self.adds_to_operand or bool(self.keep_channels)
        return self.is_scaled and not is_apart and (self.block is None or self.tensor_scale == "tensor")

    @cached_property
    def has_wide_operand(self) -> bool:
        """Whether `emulate` returns an operand in float32, because bfloat16 would round it."""
        if not self.is_scaled:
            return self.element.bits > 16
        if self.keep_channels and (self.block is None or self.tensor_scale == "tensor"):
            return True
        if self.block is None or self.adds_to_operand:
            return self.adds_to_operand
        if self.scale == "fp32":
            return not self.power_of_two
        bits, scale_bits = self.element.fraction_bits + 1, format(self.scale).mantissa_bits + 1
        return bits + (scale_bits if scale_bits > 1 else 0) > 8

"""How a tensor becomes narrow numbers: a `Cast`, and the casts that exist, as data.

A cast is an element format, a block, a scale and a rounding:

    x  ~  element(code) * scale(block) * tensor_scale

The block is (rows, columns) with columns along the axis that a GEMM contracts; None is the whole tensor, and
a 0 means "the full extent". A cast without a scale is a plain conversion (bf16, fp16, fp32).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import RANDOM_BITS, ROUNDINGS, Format, format
from narrowgauge.quantization.codebook import MAPS

SCALE_KINDS = ("none", "fp32", "e8m0", "e4m3")
HISTORY_ALGORITHMS = ("max", "most_recent")
E8M0_RULES = ("floor", "ceil", "even", "rceil")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """One way to store a tensor in narrow numbers.

    Attributes:
        element: the format of the elements.
        scale: "none" (plain conversion) | "fp32" (max / amax) | "e8m0" (OCP MX) | "e4m3" (NVFP4: E4M3
            scales under one fp32 scale for the tensor).
        block: (rows, columns) that share a scale, columns along the contraction axis; None = whole tensor.
        scale_rule: for "e8m0": how the power of two is chosen, "floor" | "ceil" | "even" | "rceil".
        rounding: a name of `formats.ROUNDINGS`.
        hadamard: 0, or the size of the Hadamard transform applied along the contraction axis first.
        headroom: the largest element aimed at is headroom * format.max ("e4m3" scales; 16/17 makes NVFP4
            free of clipping, because rounding a scale to E4M3 lowers it by at most 1/17).
        power_of_two: for "fp32" scales: cut the encoding scale to its power of two.
        signs: of the Hadamard transform: () for the size's own (TransformerEngine's for 16, else all +1),
            "random" for new ones in each step, or one +1 or -1 for each element of a group.
        random_bits: of stochastic rounding, an element: 24 is unbiased, 8 is what sm_100 does.
        history: of a tensor's own scale: 0 takes it from the tensor at hand, n from the largest magnitudes of
            the last n steps (delayed scaling).
        history_algorithm: "max" of the history, or its "most_recent" entry.
        margin: with a history: binades left free above the largest magnitude.
        outliers: 0, or the quantile beyond which (on both sides) a tensor is clamped before it is quantized.
        compensate: add what clamping took away, in high precision.
        expand: stretch each block to the format's whole range before it is quantized (COAT; state only).
        codebook: codes into a table of numbers, "dynamic" or "dynamic-unsigned" (state only); the element
            then says no more than how wide a code is.
        split: beside each bf16 element the 16 bits that make it float32 again (state only).
        prescale: of a gradient at rest: multiply its scale by a factor that learns how much room it needs.
        estimator_k, estimator_cap: 0, or the parameters of the differentiable gradient estimator of a weight.
    """

    name: str
    element: Format
    scale: str = "none"
    block: tuple[int, int] | None = None
    scale_rule: str | None = None
    rounding: str = "nearest-even"
    hadamard: int = 0
    headroom: float = 1.0
    power_of_two: bool = False
    signs: tuple[int, ...] | str = ()
    random_bits: int = RANDOM_BITS
    history: int = 0
    history_algorithm: str = "max"
    margin: int = 0
    outliers: float = 0.0
    compensate: bool = False
    expand: bool = False
    codebook: str = ""
    split: bool = False
    prescale: bool = False
    estimator_k: float = 0.0
    estimator_cap: float = 3.0

    def __post_init__(self) -> None:
        if self.scale not in SCALE_KINDS:
            raise unknown("scale", self.scale, SCALE_KINDS)
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)
        if (self.scale == "e8m0") != (self.scale_rule is not None):
            raise UserError(
                f"cast {self.name!r}: scale_rule={self.scale_rule!r} with scale={self.scale!r}, but a "
                f"scale rule belongs to E8M0 scales only; name one of {', '.join(E8M0_RULES)} there, or none"
            )
        if self.scale_rule is not None and self.scale_rule not in E8M0_RULES:
            raise unknown("scale rule", self.scale_rule, E8M0_RULES)
        if self.hadamard and (self.hadamard & (self.hadamard - 1) or self.hadamard < 2):
            raise UserError(
                f"cast {self.name!r}: hadamard={self.hadamard}, but it must be 0 or a power of two"
            )
        for key, is_right, rule in self._rules():
            if not is_right:
                raise UserError(f"cast {self.name!r}: {key} = {getattr(self, key)!r}, but {rule}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        """(key, whether its value is right, what it must be) of the keys that stand for themselves."""
        own_scale = self.scale == "fp32" and self.block is None
        signs_fit = self.signs in ((), "random") or len(self.signs) == self.hadamard
        is_plain_codebook = self.scale == "fp32" and self.rounding == "nearest-even" and not self.expand
        if not isinstance(self.signs, str):
            signs_fit = signs_fit and set(self.signs) <= {1, -1}
        return [
            ("headroom", 0 < self.headroom <= 1, "it must lie in (0, 1]"),
            ("signs", signs_fit, '"random" or one +1 or -1 for each element of a group are possible'),
            ("random_bits", 1 <= self.random_bits <= RANDOM_BITS, f"it must lie in 1 to {RANDOM_BITS}"),
            ("history", self.history >= 0, "it must be a number of steps"),
            (
                "history",
                own_scale or not self.history,
                "it needs one fp32 scale a tensor",
            ),
            (
                "history_algorithm",
                self.history_algorithm in HISTORY_ALGORITHMS,
                "max or most_recent are possible",
            ),
            ("margin", 0 <= self.margin < 64, "it must lie in 0 to 63"),
            (
                "outliers",
                not self.outliers or 0.5 < self.outliers < 1,
                "it must be 0 or a quantile such as 0.99",
            ),
            ("estimator_k", not self.estimator_k or self.estimator_k >= 1, "it must be 0, or at least 1"),
            (
                "estimator_k",
                not self.estimator_k or self.scale == "fp32",
                "it needs fp32 scales",
            ),
            ("estimator_cap", self.estimator_cap > 0, "it must be positive"),
            (
                "expand",
                not self.expand or (self.scale == "fp32" and self.block is not None),
                "it needs fp32 scales of blocks, as fp8-1x128 has",
            ),
            (
                "codebook",
                not self.codebook or (self.codebook in MAPS and is_plain_codebook),
                f"{' and '.join(MAPS)} are possible, with fp32 scales and the nearest number",
            ),
            ("split", not self.split or self.name == "bf16-split", "it belongs to cast 'bf16-split'"),
            (
                "prescale",
                not self.prescale or (own_scale and not self.history and self.element.bits == 8),
                "it needs codes of a byte under one fp32 scale a tensor, as e4m3 has",
            ),
        ]

    @property
    def is_scaled(self) -> bool:
        """Whether elements are stored with scales."""
        return self.scale != "none"

    @property
    def is_for_state(self) -> bool:
        """Whether only state can have it: its numbers are no codes of a byte, or not what they stand for."""
        narrow = self.element.bits > 8 or self.expand or bool(self.codebook) or self.prescale
        return self.split or (self.is_scaled and narrow)

    @property
    def ignores_axis(self) -> bool:
        """Whether the numbers are the same whichever axis is contracted (no block, or a square one)."""
        square = self.block is None or self.block[0] == self.block[1]
        return square and not self.hadamard and not self.outliers


def _mx(name: str, element: str) -> Cast:
    return Cast(name=name, element=format(element), scale="e8m0", block=(1, 32), scale_rule="rceil")


_CASTS = {
    c.name: c
    for c in (
        Cast(name="fp32", element=format("fp32")),
        Cast(name="bf16", element=format("bf16")),
        Cast(name="fp16", element=format("fp16")),
        Cast(name="e4m3", element=format("e4m3"), scale="fp32"),
        Cast(name="e5m2", element=format("e5m2"), scale="fp32"),
        Cast(name="e4m3fnuz", element=format("e4m3fnuz"), scale="fp32"),
        Cast(name="e5m2fnuz", element=format("e5m2fnuz"), scale="fp32"),
        Cast(name="fp8-row", element=format("e4m3"), scale="fp32", block=(1, 0)),
        Cast(name="fp8-1x128", element=format("e4m3"), scale="fp32", block=(1, 128)),
        Cast(name="fp8-128x128", element=format("e4m3"), scale="fp32", block=(128, 128)),
        _mx("mxfp8", "e4m3"),
        _mx("mxfp8-e5m2", "e5m2"),
        _mx("mxfp6-e2m3", "e2m3"),
        _mx("mxfp6-e3m2", "e3m2"),
        _mx("mxfp4", "e2m1"),
        _mx("mxint8", "int8"),
        Cast(name="nvfp4", element=format("e2m1"), scale="e4m3", block=(1, 16)),
        Cast(name="nvfp4-2d", element=format("e2m1"), scale="e4m3", block=(16, 16)),
        Cast(name="fp4-row", element=format("e2m1"), scale="fp32", block=(1, 0)),
    )
}

# Of state only (`at_rest.py`): numbers too wide for a byte, or stretched.
_STATE_CASTS = {
    c.name: c
    for c in (
        Cast(name="fp16-scaled", element=format("fp16"), scale="fp32", power_of_two=True),
        Cast(name="bf16-split", element=format("bf16"), split=True),
        Cast(name="coat", element=format("e4m3"), scale="fp32", block=(1, 128), expand=True),
        Cast(name="dynamic8", element=format("int8"), scale="fp32", block=(1, 256), codebook="dynamic"),
        Cast(
            name="dynamic8-unsigned",
            element=format("int8"),
            scale="fp32",
            block=(1, 256),
            codebook="dynamic-unsigned",
        ),
    )
}


def cast(name: str) -> Cast:
    """The cast called `name`.

    Raises:
        UserError: no cast has that name; the sentence names the nearest.
    """
    every = _CASTS | _STATE_CASTS
    if name not in every:
        raise unknown("cast", name, every)
    return every[name]


def cast_names() -> list[str]:
    """Names of the casts that an operand of a product can have; state can have them, too."""
    return list(_CASTS)


def state_cast_names() -> list[str]:
    """Names of the casts that only state can have."""
    return list(_STATE_CASTS)


# What a recipe may say of a cast, and the kind of each value.
_CAST_KEYS = {
    "cast": str,
    "element": str,
    "scale_rule": str,
    "rounding": str,
    "hadamard": int,
    "headroom": int | float,
    "power_of_two": bool,
    "signs": str | list,
    "random_bits": int,
    "history": int,
    "history_algorithm": str,
    "margin": int,
    "outliers": int | float,
    "compensate": bool,
    "expand": bool,
    "prescale": bool,
    "estimator_k": int | float,
    "estimator_cap": int | float,
}
_KINDS: Mapping[object, str] = {str: "text in quotes", bool: "true or false"}


def make_cast(value: str | Mapping[str, Any]) -> Cast:
    """A cast from a recipe's text: a name, or a table `{cast = "nvfp4", rounding = "stochastic", ...}`.

    Raises:
        UserError: unknown cast, unknown key, or values that do not go together.
    """
    if isinstance(value, str):
        return cast(value)
    for key, of_key in value.items():
        if key not in _CAST_KEYS:
            raise unknown("cast key", key, _CAST_KEYS)
        kind = _CAST_KEYS[key]
        if not isinstance(of_key, kind) or isinstance(of_key, bool) != (kind is bool):
            raise UserError(f"cast key {key} = {of_key!r}, but it must be {_KINDS.get(kind, 'a number')}")
    changes = dict(value)
    base = cast(changes.pop("cast", "(none named)"))
    if "element" in changes:
        changes["element"] = format(changes["element"])
    if isinstance(signs := changes.get("signs"), list):
        changes["signs"] = tuple(signs)
    return dataclasses.replace(base, **changes)

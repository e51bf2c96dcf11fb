"""The scales of a cast: one per block, and for NVFP4 an outer scale over the scales of many blocks.

    x  ~  element(code) * scale(block) * outer scale

`quantization.scales` computes them from the amax of each block, and states the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from narrowgauge.formats import ROUNDINGS, format
from narrowgauge.once import compute_all
from narrowgauge.quantization.stages import Names, Rules, Stage

FORMATS = ("none", "fp32", "bf16", "e8m0", "e4m3", "e5m3")
BYTES = ("e8m0", "e4m3", "e5m3")  # formats of 8 bits
ROUNDED = ("bf16", "e4m3", "e5m3")  # formats to which the quotient amax / max is rounded
OUTER = ("none", "tensor", "row")
E8M0_RULES = ("floor", "ceil", "even", "rceil")
ZERO = ("one", "zero", "smallest")


@dataclass(frozen=True, kw_only=True)
class Scales(Stage):
    """How the blocks of a cast are scaled.

    Attributes:
        format: "none" (plain conversion), or the format of the block scales: "fp32", "bf16", "e8m0" (OCP MX),
            "e4m3", "e5m3" (UE5M3).
        rule: How the power of two of an "e8m0" scale is chosen: "floor", "ceil", "even" or "rceil".
        power_of_two: Whether an "fp32" encoding scale is rounded down to a power of two.
        headroom: The share of the largest element that scales aim at. 16/17 makes NVFP4 free of clipping,
            because rounding a scale to E4M3 lowers it by at most 1/17; above 1, the largest values are
            clipped.
        rounding: How scales in bf16, e4m3 and e5m3 are rounded: a name of `formats.ROUNDINGS`.
        zero: What a scale that rounds to 0 becomes: "one" or "zero" (the block is zeros), or "smallest" (the
            smallest positive value); "" means "zero" in NVFP4, else "one".
        outer: "none", or the extent of an outer scale in fp32: "tensor" (NVFP4), "row" of an operand, or a
            number of columns of a row, such as "128".
        target: The target of the largest block scale under an outer scale; 0 means 448, or 256 with
            candidates.
        correction: "projection" multiplies the scales of a Hadamard group (of a block, without a transform)
            by the factor that makes the projection of its values on themselves exact (MS-EDEN), before
            `rounding` rounds them; elements are rounded under the nearest scale. "" for none.
    """

    format: str = "none"
    rule: str | None = None
    power_of_two: bool = False
    headroom: float = 1.0
    rounding: str = "nearest-even"
    zero: str = ""
    outer: str = "none"
    target: float = 0.0
    correction: str = ""
    KEYS: ClassVar[Mapping[str, str]] = {
        **{"scale": "format", "scale_rule": "rule", "power_of_two": "power_of_two", "headroom": "headroom"},
        **{"scale_rounding": "rounding", "zero_scale": "zero", "tensor_scale": "outer"},
        **{"scale_target": "target", "correct": "correction"},
    }
    NAMES: ClassVar[Names] = {
        **{"scale": ("format", FORMATS), "tensor scale": ("outer_kind", OUTER)},
        **{"scale rule": ("rule", (*E8M0_RULES, None)), "scale rounding": ("rounding", ROUNDINGS)},
        **{"correction": ("correction", ("", "projection")), "zero scale": ("zero", ("", *ZERO))},
    }

    def __post_init__(self) -> None:
        compute_all(self)

    @cached_property
    def are_codes(self) -> bool:
        """Whether a block scale is stored as a one-byte code."""
        return self.format in BYTES

    @cached_property
    def are_nvfp4(self) -> bool:
        """Whether they follow TransformerEngine's arithmetic for NVFP4: E4M3 under an outer scale."""
        return self.format == "e4m3" and self.outer != "none"

    @cached_property
    def are_rounded(self) -> bool:
        """Whether a block scale is a quotient rounded to a format, by which elements are divided."""
        return self.format in ROUNDED and not self.are_nvfp4

    @cached_property
    def by_row(self) -> bool:
        """Whether there is an outer scale for each row, or for groups of columns in a row."""
        return self.outer not in ("none", "tensor")

    @cached_property
    def outer_columns(self) -> int:
        """The columns of a row that share an outer scale; 0 for all of them."""
        return int(self.outer) if self.outer.isdigit() else 0

    @property
    def outer_kind(self) -> str:
        """One of `OUTER`; "row" also for groups of columns in a row."""
        return "row" if self.outer_columns else self.outer

    @cached_property
    def zero_rule(self) -> str:
        """What a scale that rounds to 0 becomes: one of `ZERO`."""
        return self.zero or ("zero" if self.are_nvfp4 else "one")

    def rules(self) -> Rules:
        """The rules of its keys."""
        is_rounded, rounded = self.format in ROUNDED, ", ".join(ROUNDED)
        rounds = f"it belongs to scales in {rounded}, which are rounded to their format"
        e8m0_only = (
            f"a scale rule belongs to E8M0 scales only; name one of {', '.join(E8M0_RULES)} there, or none"
        )
        two_levels = f"it stands over block scales in {rounded}, as nvfp4 has them"
        under = f"it is what scales in {rounded} aim at under a tensor scale; leave it out"
        in_format = f"it must lie above 0 and not above {self.format}'s largest number"
        cuts = "it cuts scales in fp32; leave it out"
        aims = "of the rules for E8M0 scales only rceil has a largest element to aim at"
        return [
            ("scale_rule", (self.format == "e8m0") == bool(self.rule), e8m0_only),
            ("tensor_scale", self.outer == "none" or is_rounded, two_levels),
            ("scale_target", not self.target or self.outer != "none", under),
            ("scale_target", not is_rounded or 0 <= self.target <= format(self.format).max, in_format),
            ("scale_rounding", is_rounded or self.rounding == "nearest-even", rounds),
            ("zero_scale", is_rounded or not self.zero, rounds),
            ("headroom", 0 < self.headroom <= 2, "it must lie above 0 and not above 2"),
            ("headroom", self.headroom == 1 or self.format != "e8m0" or self.rule == "rceil", aims),
            ("power_of_two", not self.power_of_two or self.format == "fp32", cuts),
            ("correct", not self.correction or is_rounded, rounds),
        ]

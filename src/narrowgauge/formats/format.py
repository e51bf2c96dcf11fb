"""Number formats: each stores a few facts, from which every limit is derived.

A binary floating-point format with E exponent bits, M mantissa bits and bias b holds

    normal      (-1)^s * 2^(e - b) * (1 + m / 2^M)      e = 1 .. (top), m = 0 .. 2^M - 1
    subnormal   (-1)^s * 2^(1 - b) * (0 + m / 2^M)      e = 0

Besides their bit counts, the formats of low-precision training differ in which codes they reserve for
infinity and NaN (`Specials`): IEEE reserves a full exponent, OCP's E4M3 two codes, the 6-bit and 4-bit MX
element formats none, and the "fnuz" variants of AMD's MI300 reuse the code of -0.

E8M0 is unsigned, with no mantissa, zero or subnormals. It stores only scales, 2^(code - 127). MX's INT8 has
no exponent: it is a two's-complement integer in units of 1/64, expressed here as a format with only
subnormals (bias 0, so that 2^(1 - b) * m / 2^7 = m / 64). INT4 works the same way in units of 1 (bias -2).
UE5M3 (`e5m3`) is an unsigned scale format with zero and subnormals.

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0,
section 5; IEEE 754-2019; ONNX float stored in 8 bits (the fnuz variants).
"""

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from narrowgauge.system.errors import UserError
from narrowgauge.system.lazy import compute_all


class Specials(Enum):
    """Which codes of a format do not represent finite numbers."""

    IEEE = "the top exponent holds infinity (mantissa 0) and NaN"
    NAN_ONLY = "the code with all bits set is NaN; no infinity"
    NEGATIVE_ZERO = "the code of -0 is the only NaN; no infinity, no -0"
    NONE = "every code is a finite number"

    @classmethod
    def _missing_(cls, value: object) -> "Specials":
        raise UserError(f"specials = {value!r}: it must be one of {', '.join(map(str, cls))}")


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, defined by a few facts; all limits are derived from them."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    signed: bool = True
    zero: bool = True  # False: code 0 is the smallest power of two, and there are no subnormals
    twos_complement: bool = False  # True: the code is a signed integer rather than sign and magnitude
    source: str = ""

    def __post_init__(self) -> None:
        for key, kind in Format.__annotations__.items():
            if type(found := getattr(self, key)) is not kind:
                raise UserError(f"format {self.name!r}: {key} = {found!r}, but it must be {kind.__name__}")
        has_codes, is_ieee = self.specials is not Specials.NONE, self.specials is Specials.IEEE
        is_plain = self.signed and self.zero and not has_codes and not self.exponent_bits
        is_used_up = self.specials is Specials.NAN_ONLY and self.exponent_bits + self.mantissa_bits == 1
        rules = (
            (min(self.exponent_bits, self.mantissa_bits, self.bits - 2) < 0, "it needs two bits or more"),
            (has_codes and not self.exponent_bits, "special codes need an exponent bit"),
            (is_ieee and not self.mantissa_bits, "NaN differs from infinity in a mantissa bit; add one"),
            (is_used_up, "NaN takes its only code above zero; add a bit"),
            (self.specials is Specials.NEGATIVE_ZERO and not self.signed, "no -0 holds NaN; make it signed"),
            (self.twos_complement and not is_plain, "two's complement has a sign and no exponent"),
            (self.emax > 1023 or self.emin - self.mantissa_bits < -1074, "float64 does not hold its values"),
        )
        if broken := [rule for is_broken, rule in rules if is_broken]:
            raise UserError(f"format {self.name!r}: {broken[0]}")
        compute_all(self)

    def __repr__(self) -> str:
        bits = f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}, bias={self.bias}"
        return f"Format({self.name!r}, {bits}, max={self.max:g})"

    @cached_property
    def bits(self) -> int:
        """Bits per code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @cached_property
    def is_fixed_point(self) -> bool:
        """Whether every value is subnormal: no exponent bit is left to hold a normal one."""
        return self.exponent_bits == (self.specials is Specials.IEEE)

    @cached_property
    def fraction_bits(self) -> int:
        """Bits after the leading one in the highest binade."""
        return self.mantissa_bits - self.is_fixed_point

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return (1 if self.zero else 0) - self.bias

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        top_is_taken = self.specials is Specials.IEEE or (
            self.specials is Specials.NAN_ONLY and self.mantissa_bits == 0
        )
        return 2**self.exponent_bits - 1 - top_is_taken - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite value; finite overflow saturates here."""
        lost_to_nan = self.specials is Specials.NAN_ONLY and self.mantissa_bits > 0
        steps = 2**self.fraction_bits - 1 - lost_to_nan
        return math.ldexp(1 + steps * 2.0**-self.fraction_bits, self.emax)

    @cached_property
    def smallest_normal(self) -> float:
        """2^emin; in fixed point the smallest positive value."""
        return self.smallest_subnormal if self.is_fixed_point else math.ldexp(1.0, self.emin)

    @cached_property
    def smallest_subnormal(self) -> float:
        """The smallest positive value: the grid spacing around zero."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    @cached_property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.fraction_bits

    @cached_property
    def has_infinity(self) -> bool:
        """Whether the format has an infinity."""
        return self.specials is Specials.IEEE

    @cached_property
    def has_negative_zero(self) -> bool:
        """Whether -0 has a code distinct from +0."""
        is_magnitude = self.signed and not self.twos_complement
        return is_magnitude and self.zero and self.specials is not Specials.NEGATIVE_ZERO

    @cached_property
    def extent(self) -> tuple[float, ...]:
        """Measures of its set of values: a format with all these, or more, has every value of this one."""
        signs = self.signed, self.zero, self.has_infinity, self.has_negative_zero
        return *signs, self.fraction_bits, self.max, -self.smallest_subnormal

    @cached_property
    def nan_code(self) -> int | None:
        """The code written for NaN (positive, quiet); None where the format has none."""
        match self.specials:
            case Specials.IEEE:
                top_exponent = (2**self.exponent_bits - 1) << self.mantissa_bits
                return top_exponent | 1 << (self.mantissa_bits - 1)
            case Specials.NAN_ONLY:
                return 2 ** (self.exponent_bits + self.mantissa_bits) - 1
            case Specials.NEGATIVE_ZERO:
                return 2 ** (self.bits - 1)
            case Specials.NONE:
                return None

    @cached_property
    def infinity_code(self) -> int | None:
        """The code of +infinity; None where the format has none."""
        return (2**self.exponent_bits - 1) << self.mantissa_bits if self.has_infinity else None

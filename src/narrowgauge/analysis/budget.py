"""The budgets of a search: a quantity of an assignment, and the range that it must lie in.

With s_i the share of all FLOPs in GEMM i, f_i its format, e(f) the bits of an element of f, b(f) these plus
its part of a block's scale, and r(f) the FLOP/s of GEMMs in f on a device:

    share of FLOPs    sum of s_i over the GEMMs with e(f_i) of at most 4    X to X + 0.05
    effective bits    sum of s_i b(f_i)                                     at most X
    GEMM time         sum of s_i r(widest) / r(f_i)                         at most X

All three are sums over GEMMs, so one solver serves them all. Both operands of a GEMM have its format.
ModelOpt's `auto_quantize(effective_bits=...)` takes the mean over weights. Here it is over FLOPs, since a
GEMM of a training step has two operands, and only one of the six places of a layer is stored. GEMM time
leaves out the casts, which `plan` reports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from narrowgauge.errors import UserError
from narrowgauge.formats import format
from narrowgauge.quantization import Cast

NARROW_BITS = 4
TOLERANCE = 0.05
EPSILON = 1e-9  # sums of shares are not exact


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of an assignment.

    Attributes:
        option: The option and its value, for errors.
        words: The unit of an amount, such as "of the FLOPs in 4 bits".
        amounts: The amount of a GEMM that does all FLOPs, by the name of its format.
        low: The smallest amount.
        high: The largest amount.
    """

    option: str
    words: str
    amounts: Mapping[str, float]
    low: float
    high: float

    def holds(self, amount: float) -> bool:
        """Whether an amount lies in the range."""
        return self.low - EPSILON <= amount <= self.high + EPSILON


def flops_budget(casts: Mapping[str, Cast], share: float) -> Budget:
    """The budget of a share of FLOPs in formats of at most 4 bits.

    Raises:
        UserError: No format has at most 4 bits, or the share is out of range.
    """
    if all(cast.element.bits > NARROW_BITS for cast in casts.values()):
        raise UserError(
            f"--formats {','.join(casts)}: none has {NARROW_BITS} bits or fewer, and the budget is a share "
            "of FLOPs in such formats; add one, such as mxfp4"
        )
    if not 0 <= share <= 1:
        raise UserError(f"--budget {share} must be a share from 0 to 1, such as 0.75")
    amounts = {name: float(cast.element.bits <= NARROW_BITS) for name, cast in casts.items()}
    return Budget(f"--budget {share}", "of the FLOPs in 4 bits", amounts, share, min(1.0, share + TOLERANCE))


def bits_budget(casts: Mapping[str, Cast], bits: float) -> Budget:
    """The budget of the mean number of bits per operand element.

    Raises:
        UserError: Even the narrowest of the formats has more bits.
    """
    amounts = {name: _bits(cast) for name, cast in casts.items()}
    return _at_most(f"--effective-bits {bits}", "bits an element", amounts, bits)


def time_budget(casts: Mapping[str, Cast], share: float, speeds: Mapping[str, float], device: str) -> Budget:
    """The budget of a share of the time that all GEMMs take in the widest format.

    Args:
        casts: The formats by name.
        share: The share of that time, above 0.
        speeds: FLOP/s of GEMMs in each format on the device.
        device: The name of the device's file.

    Raises:
        UserError: Even the fastest of the formats takes more.
    """
    widest = widest_of(casts)
    amounts = {name: speeds[widest] / speeds[name] for name in casts}
    words = f"of the GEMM time in {widest} on {device}"
    return _at_most(f"--gemm-time {share}", words, amounts, share)


def widest_of(casts: Mapping[str, Cast]) -> str:
    """The name of the format with the most bits; the last of equals."""
    return max(reversed(list(casts)), key=lambda name: casts[name].element.bits)


def require_solver() -> None:
    """Check that the solver is installed, before anything is measured.

    Raises:
        UserError: It is missing.
    """
    if find_spec("scipy") is None:
        raise UserError("search needs scipy, which is not installed; pip install scipy")


def _bits(cast: Cast) -> float:
    """Bits of an element and its share of a block's scale; scales of rows and tensors are negligible."""
    elements = cast.block[0] * cast.block[1] if cast.block else 0
    return cast.element.bits + (format(cast.scales.format).bits / elements if elements else 0)


def _at_most(option: str, words: str, amounts: Mapping[str, float], most: float) -> Budget:
    """A budget with only an upper limit."""
    least = min(amounts, key=lambda name: amounts[name])
    if not most >= amounts[least] - EPSILON:  # refuses NaN as well
        raise UserError(
            f"{option} is out of reach: everything in {least} has {amounts[least]:.4g} {words}; take more, "
            "or add a narrower format to --formats"
        )
    return Budget(option, words, amounts, 0.0, most)

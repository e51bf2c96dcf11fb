"""How a tensor becomes narrow numbers, as a record: a `Cast`.

A cast is an element format, a block, a scale and a rounding:

    x  ~  element(code) * scale(block) * tensor_scale

The block is (rows, columns) with columns along the axis that a GEMM contracts; None is the full tensor, and
a 0 means "the full extent". A cast without a scale is a plain conversion (bf16, fp16, fp32). The casts that
exist are data in `named_casts.py`.
"""

from dataclasses import dataclass

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import RANDOM_BITS, ROUNDINGS, Format

SCALES = ("none", "fp32", "e8m0", "e4m3")
HISTORY_ALGORITHMS = ("max", "most_recent")
E8M0_RULES = ("floor", "ceil", "even", "rceil")
CODEBOOKS = ("dynamic", "dynamic-unsigned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """One way to store a tensor in narrow numbers.

    Attributes:
        name: The name of the named cast that it is, or is made from.
        element: The format of the elements.
        scale: "none" (plain conversion) | "fp32" (max / amax) | "e8m0" (OCP MX) | "e4m3" (NVFP4: E4M3
            scales under one fp32 scale for the tensor).
        block: (rows, columns) that share a scale, columns along the contraction axis; None = the full tensor.
        scale_rule: How the power of two of "e8m0" is chosen: "floor" | "ceil" | "even" | "rceil".
        rounding: A name of `formats.ROUNDINGS`.
        hadamard: 0, or the size of the Hadamard transform applied along the contraction axis first.
        headroom: The share of the largest element that "e4m3" scales aim at; 16/17 makes NVFP4 free of
            clipping, because rounding a scale to E4M3 lowers it by at most 1/17.
        power_of_two: Whether an "fp32" encoding scale is cut to its power of two.
        signs: The signs of the Hadamard transform: () for those of its size (TransformerEngine's for 16, else
            all +1), "random" for new ones in each step, or one +1 or -1 for each element of a group.
        random_bits: Random bits an element of stochastic rounding: 24 is unbiased, 8 is what sm_100 does.
        history: 0 takes a tensor's scale from the tensor itself, n from its largest magnitudes in the last
            n steps (delayed scaling).
        history_algorithm: "max" of the history, or its "most_recent" entry.
        margin: With a history, the binades that are left free above the largest magnitude.
        outliers: 0, or the quantile beyond which (on both sides) a tensor is clamped before it is quantized.
        compensate: Whether what clamping took away is added again, in high precision.
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
        _require_valid(self)

    @property
    def is_scaled(self) -> bool:
        """Whether elements are stored with scales."""
        return self.scale != "none"

    @property
    def is_for_state(self) -> bool:
        """Whether only state can have it: its elements are wider than a byte, or stretched, or split."""
        is_wide = self.element.bits > 8 or self.expand or bool(self.codebook) or self.prescale
        return self.split or (self.is_scaled and is_wide)

    @property
    def ignores_axis(self) -> bool:
        """Whether the numbers are the same whichever axis is contracted (no block, or a square one)."""
        is_square = self.block is None or self.block[0] == self.block[1]
        return is_square and not self.hadamard and not self.outliers


def _require_valid(cast: Cast) -> None:
    """Refuse a cast with an unknown name, a value out of bounds, or keys that do not fit together."""
    for key, name, known in (
        ("scale", cast.scale, SCALES),
        ("scale rule", cast.scale_rule, (*E8M0_RULES, None)),
        ("rounding", cast.rounding, ROUNDINGS),
        ("history algorithm", cast.history_algorithm, HISTORY_ALGORITHMS),
    ):
        if name not in known:
            raise unknown(key, str(name), filter(None, known))
    for key, is_right, rule in _rules(cast):
        if not is_right:
            raise UserError(f"cast {cast.name!r}: {key} = {getattr(cast, key)!r}, but {rule}")


def require_codes(cast: Cast) -> None:
    """Refuse a cast whose elements are not codes of a byte or less under scales."""
    if not cast.is_scaled:
        raise UserError(
            f"cast {cast.name!r} stores no scales; use torch's .to() or narrowgauge.round_to for it"
        )
    if cast.element.bits > 8 or cast.codebook:
        raise UserError(
            f"cast {cast.name!r} has no codes of a byte: it is for state (weight, master, grad, m, v)"
        )


def _rules(cast: Cast) -> list[tuple[str, bool, str]]:
    """(key, whether its value is right, the rule) of each key that is bounded or must fit others."""
    fp32, block = cast.scale == "fp32", cast.block is not None
    size, signs, k = cast.hadamard, cast.signs, cast.estimator_k
    is_signs = signs in ((), "random") or (len(signs) == size and set(signs) <= {1, -1})
    is_quantile = cast.outliers == 0 or 0.5 < cast.outliers < 1
    is_plain = fp32 and cast.rounding == "nearest-even" and not cast.expand
    is_byte = fp32 and not block and not cast.history and cast.element.bits == 8
    e8m0_only = (
        f"a scale rule belongs to E8M0 scales only; name one of {', '.join(E8M0_RULES)} there, or none"
    )
    maps = f"{' and '.join(CODEBOOKS)} are possible, with fp32 scales and the nearest number"
    byte = "it needs codes of a byte under one fp32 scale a tensor, as e4m3 has"
    blocks = "it needs fp32 scales of blocks, as fp8-1x128 has"
    return [
        ("scale_rule", (cast.scale == "e8m0") == bool(cast.scale_rule), e8m0_only),
        ("hadamard", not size or (size > 1 and not size & (size - 1)), "it must be 0 or a power of two"),
        ("headroom", 0 < cast.headroom <= 1, "it must lie in (0, 1]"),
        ("signs", is_signs, '"random" or one +1 or -1 for each element of a group are possible'),
        ("random_bits", 1 <= cast.random_bits <= RANDOM_BITS, f"it must lie in 1 to {RANDOM_BITS}"),
        ("history", cast.history >= 0, "it must be a number of steps"),
        ("history", not cast.history or (fp32 and not block), "it needs one fp32 scale a tensor"),
        ("margin", 0 <= cast.margin < 64, "it must lie in 0 to 63"),
        ("outliers", is_quantile, "it must be 0 or a quantile such as 0.99"),
        ("estimator_k", k == 0 or k >= 1, "it must be 0, or at least 1"),
        ("estimator_k", k == 0 or fp32, "it needs fp32 scales"),
        ("estimator_cap", cast.estimator_cap > 0, "it must be positive"),
        ("expand", not cast.expand or (fp32 and block), blocks),
        ("codebook", not cast.codebook or (cast.codebook in CODEBOOKS and is_plain), maps),
        ("split", not cast.split or cast.name == "bf16-split", "it belongs to cast 'bf16-split'"),
        ("prescale", not cast.prescale or is_byte, byte),
    ]

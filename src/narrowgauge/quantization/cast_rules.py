"""The rules that the keys of a cast obey, each with the sentence that refuses a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import RANDOM_BITS, ROUNDINGS

if TYPE_CHECKING:  # `cast.py` imports this file
    from narrowgauge.quantization.cast import Cast

SCALES = ("none", "fp32", "e8m0", "e4m3")
HISTORY_ALGORITHMS = ("max", "most_recent")
E8M0_RULES = ("floor", "ceil", "even", "rceil")
CODEBOOKS = ("dynamic", "dynamic-unsigned")


def require_valid(cast: Cast) -> None:
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

"""What a cast may be: names that exist, values within their bounds, keys that do not contradict each other.

A cast is a `cast.Cast`, which calls `require_valid` when it is made.
"""

from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.formats import RANDOM_BITS, ROUNDINGS, format
from narrowgauge.quantization.stages.stage import Rules

SCALES = ("none", "fp32", "bf16", "e8m0", "e4m3", "e5m3")
TENSOR_SCALES = ("none", "tensor", "row")
ROUNDED_SCALES = ("bf16", "e4m3", "e5m3")  # of those that are the quotient, rounded to a format
ZERO_SCALES = ("one", "zero", "smallest")  # what a scale that rounds to 0 becomes
CHOICES = ("mae", "mse", "max")
HISTORY_ALGORITHMS = ("max", "most_recent")
E8M0_RULES = ("floor", "ceil", "even", "rceil")
CODEBOOKS = ("dynamic", "dynamic-unsigned")


def require_valid(cast: Any) -> None:
    """Refuse a cast with an unknown name, a value out of bounds, or keys that do not fit together."""
    for key, name, known in (
        ("scale", cast.scale, SCALES),
        ("tensor scale", "row" if cast.columns_above else cast.tensor_scale, TENSOR_SCALES),
        ("scale rule", cast.scale_rule, (*E8M0_RULES, None)),
        ("rounding", cast.rounding, ROUNDINGS),
        ("scale rounding", cast.scale_rounding, ROUNDINGS),
        ("center", cast.mean.over, ("", "tokens")),
        ("correction", cast.correct, ("", "projection")),
        ("feedback", cast.feedback, ("", "momentum")),
        ("choice", cast.choose, ("", *CHOICES)),
        ("zero scale", cast.zero_scale, ("", *ZERO_SCALES)),
        ("history algorithm", cast.history_algorithm, HISTORY_ALGORITHMS),
    ):
        if name not in known:
            raise unknown(key, str(name), filter(None, known))
    for key, is_right, rule in (
        *_rules_of_scales(cast),
        *_rules_of_candidates(cast),
        *_rules_of_elements(cast),
        *(rule for stage in cast.stages for rule in stage.rules(cast)),
        *_rules(cast),
    ):
        if not is_right:
            value = cast.values()[key]
            shown = value.name if key == "element" else value
            raise UserError(f"cast {cast.name!r}: {key} = {shown!r}, but {rule}")


def require_codes(cast: Any) -> None:
    """Refuse a cast whose elements are not codes of a byte or less under scales."""
    if not cast.is_scaled:
        raise UserError(
            f"cast {cast.name!r} stores no scales; use torch's .to() or narrowgauge.round_to for it"
        )
    if cast.element.bits > 8 or cast.codebook:
        raise UserError(
            f"cast {cast.name!r} has no codes of a byte: it is for state (weight, master, grad, m, v)"
        )


def _rules_of_scales(cast: Any) -> Rules:
    """(key, whether its value is right, the rule) of element, block, scale, and what depends on them."""
    scale, block, bits = cast.scale, cast.block, cast.element.bits
    is_wide_scaled = bits > 8 and cast.is_scaled
    e8m0_only = (
        f"a scale rule belongs to E8M0 scales only; name one of {', '.join(E8M0_RULES)} there, or none"
    )
    rounds = f"it belongs to scales in {', '.join(ROUNDED_SCALES)}, which are rounded to their format"
    two_levels = f"it stands over block scales in {', '.join(ROUNDED_SCALES)}, as nvfp4 has them"
    return [
        ("element", cast.element.signed, "it is a format of scales; write it as the key scale"),
        ("scale", cast.is_scaled or bits > 8, f"narrow elements need one; name {', '.join(SCALES[1:])}"),
        ("scale", cast.is_scaled or block is None, "a block shares a scale; name one, or leave block out"),
        (
            "scale",
            not is_wide_scaled or (scale == "fp32" and block is None and bits == 16),
            "elements of more than a byte have no scale, or those of 16 bits one in fp32 a tensor",
        ),
        ("block", block is None or min(block) >= 0, "its rows and columns are positive numbers"),
        ("scale_rule", (scale == "e8m0") == bool(cast.scale_rule), e8m0_only),
        ("tensor_scale", cast.tensor_scale == "none" or scale in ROUNDED_SCALES, two_levels),
        (
            "tensor_scale",
            cast.tensor_scale == "none" or block is not None,
            "the block is the tensor; name a smaller block",
        ),
        (
            "tensor_scale",
            not cast.is_scaled_by_row or block is None or (block[0] == 1 and block[1] != 0),
            "a row needs several blocks, and a block one row; name a block such as 16",
        ),
        (
            "tensor_scale",
            not cast.columns_above or not block or not block[1] or cast.columns_above % block[1] == 0,
            "so many columns must be whole blocks; name a multiple of the block's columns",
        ),
        (
            "scale_target",
            not cast.scale_target or cast.tensor_scale != "none",
            "it is what scales in "
            + ", ".join(ROUNDED_SCALES)
            + " aim at under a tensor scale; leave it out",
        ),
        (
            "scale_target",
            scale not in ROUNDED_SCALES or 0 <= cast.scale_target <= format(scale).max,
            f"it must lie above 0 and not above {scale}'s largest number",
        ),
        ("scale_rounding", scale in ROUNDED_SCALES or cast.scale_rounding == "nearest-even", rounds),
        ("zero_scale", scale in ROUNDED_SCALES or not cast.zero_scale, rounds),
        ("headroom", 0 < cast.headroom <= 2, "it must lie above 0 and not above 2"),
        (
            "headroom",
            cast.headroom == 1 or scale != "e8m0" or cast.scale_rule == "rceil",
            "of the rules for E8M0 scales only rceil has a largest element to aim at",
        ),
        ("headroom", cast.headroom == 1 or not cast.history, "a history leaves room by its margin"),
        ("power_of_two", not cast.power_of_two or scale == "fp32", "it cuts scales in fp32; leave it out"),
    ]


def _rules_of_candidates(cast: Any) -> Rules:
    """The same of candidates, and of the choice between them."""
    candidates, block = cast.candidates, cast.block
    is_fixed = block is not None and block[1] != 0
    rounds = f"it belongs to scales in {', '.join(ROUNDED_SCALES)}, which are rounded to their format"
    return [
        (
            "candidates",
            not candidates or bool(cast.choose),
            "a choice is missing; add choose = 'mae'",
        ),
        (
            "choose",
            not cast.choose or bool(candidates or cast.elements),
            "there are no candidates; add candidates = [6, 4]",
        ),
        (
            "candidates",
            len(candidates) != 1 and all(0 < c <= cast.element.max for c in candidates),
            f"two or more numbers above 0 and not above {cast.element.max:g} are needed",
        ),
        (
            "candidates",
            not candidates or cast.scale in ROUNDED_SCALES,
            f"they belong to scales in {', '.join(ROUNDED_SCALES)}",
        ),
        ("refresh", cast.refresh == 0 or cast.refresh > 1, "it is a number of steps, two or more"),
        (
            "refresh",
            not cast.refresh or cast.tensor_scale == "tensor",
            "it holds the largest magnitude under tensor_scale = 'tensor', and scales of this cast are "
            "current; leave it out",
        ),
        (
            "refresh",
            not cast.refresh or not cast.transforms,
            "what is held is of the tensor as it comes; leave out hadamard, center and outliers",
        ),
        ("correct", not cast.correct or cast.scale in ROUNDED_SCALES, rounds),
        (
            "correct",
            not cast.correct or (is_fixed and block[0] == 1 and cast.hadamard.size % block[1] == 0),
            "it needs blocks of one row that divide the size of the Hadamard transform, such as 16",
        ),
        ("candidates", not candidates or is_fixed, "they need blocks of a fixed size, such as 16"),
    ]


def _rules_of_elements(cast: Any) -> Rules:
    """The same of candidates that are element formats."""
    names, block = cast.elements, cast.block
    if not names:
        return []
    return [
        ("choose", bool(cast.choose), "between elements a choice is missing; add choose = 'mse'"),
        (
            "elements",
            len(names) == 2 and names[0] == cast.element.name,
            f"candidates are two formats, the first the cast's own element, {cast.element.name}",
        ),
        (
            "elements",
            len({format(name).bits for name in names}) == 1,
            "candidates have codes of the same number of bits",
        ),
        (
            "elements",
            cast.scale == "e4m3" and not cast.correct,
            "which one a block has is the sign of its scale, so scales must be e4m3, without correct",
        ),
        ("elements", block is not None and block[1] != 0, "they need blocks of a fixed size, such as 16"),
    ]


def _rules(cast: Any) -> Rules:
    """(key, whether its value is right, the rule) of each key that is bounded or must fit others."""
    fp32, block = cast.scale == "fp32", cast.block is not None
    k = cast.estimator_k
    is_plain = fp32 and cast.rounding == "nearest-even" and not cast.expand
    is_byte = fp32 and not block and not cast.history and cast.element.bits == 8
    maps = f"{' and '.join(CODEBOOKS)} are possible, with fp32 scales and the nearest number"
    byte = "it needs codes of a byte under one fp32 scale a tensor, as e4m3 has"
    blocks = "it needs fp32 scales of blocks, as fp8-1x128 has"
    return [
        ("random_bits", 1 <= cast.random_bits <= RANDOM_BITS, f"it must lie in 1 to {RANDOM_BITS}"),
        ("history", cast.history >= 0, "it must be a number of steps"),
        ("history", not cast.history or (fp32 and not block), "it needs one fp32 scale a tensor"),
        ("margin", 0 <= cast.margin < 64, "it must lie in 0 to 63"),
        ("estimator_k", k == 0 or k >= 1, "it must be 0, or at least 1"),
        ("estimator_k", k == 0 or fp32, "it needs fp32 scales"),
        ("estimator_cap", cast.estimator_cap > 0, "it must be positive"),
        ("expand", not cast.expand or (fp32 and block), blocks),
        ("codebook", not cast.codebook or (cast.codebook in CODEBOOKS and is_plain), maps),
        ("split", not cast.split or cast.name == "bf16-split", "it belongs to cast 'bf16-split'"),
        ("prescale", not cast.prescale or is_byte, byte),
    ]

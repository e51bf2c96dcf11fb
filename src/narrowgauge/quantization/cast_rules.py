"""What makes a cast valid: known names, bounds, and what its keys need of each other."""

from collections.abc import Iterator
from typing import Any

from narrowgauge.formats import RANDOM_BITS, Format, format
from narrowgauge.quantization.keys import E8M0_RULES, KEYS, ROUNDED, SCALES
from narrowgauge.system.errors import UserError, unknown

#: (key, whether its value is valid, the rule as a clause), which holds for a value other than the default.
Rule = tuple[str, bool, str]
_ALWAYS = ("scale", "scale_rule")  # keys that other keys need, so that their default may be wrong


def require_valid(cast: Any) -> None:
    """Refuse a cast with an unknown name, a value out of bounds, or incompatible keys."""
    for name, key in KEYS.items():
        value = "row" if name == "tensor_scale" and cast.outer_columns else getattr(cast, name)
        if key.among and value not in key.among:
            raise unknown(key.word or name, str(value), filter(None, key.among))
    for name, is_right, rule in (*_rules_of_scales(cast), *_rules_of_values(cast)):
        if not is_right and (name in cast.changed_keys or name in _ALWAYS):
            value = getattr(cast, name)
            shown = value.name if isinstance(value, Format) else value
            raise UserError(f"cast {cast.name!r}: {name} = {shown!r}, but {rule}")


def _rules_of_scales(c: Any) -> Iterator[Rule]:
    """The rules of elements, blocks, scales and candidates."""
    bits, fp32, is_rounded = c.element.bits, c.scale == "fp32", c.scale in ROUNDED
    rows, columns = c.block or (0, 0)
    rounded = ", ".join(ROUNDED)
    rounds = f"it belongs to scales in {rounded}, which are rounded to their format"
    of_rounded, fixed = f"they belong to scales in {rounded}", "they need blocks of a fixed size, such as 16"
    is_wide_right = not c.is_scaled or (fp32 and c.block is None and bits == 16)
    wide = "elements of more than a byte have no scale, or with 16 bits one in fp32 a tensor"
    a_row = "a row needs several blocks, and a block one row; name a block such as 16"
    whole = "this must be a whole number of blocks; name a multiple of the block's columns"
    group = "it needs blocks of one row that divide the size of the Hadamard transform, such as 16"
    largest, aims = c.element.max, "of the rules for E8M0 scales only rceil has a largest element to aim at"
    among = len(c.candidates) != 1 and all(0 < one <= largest for one in c.candidates)
    e8m0 = f"a scale rule belongs to E8M0 scales only; name one of {', '.join(E8M0_RULES)} there, or none"
    under = f"it is what scales in {rounded} aim at under a tensor scale; leave it out"
    function = "the function is the whole cast; leave the other keys out"
    yield "function", not (c.is_scaled or c.is_transformed), function
    yield "element", c.element.signed, "it is a format of scales; write it as the key scale"
    yield "scale", c.is_scaled or bits > 8, f"narrow elements need one; name {', '.join(SCALES[1:])}"
    yield "scale", c.is_scaled or c.block is None, "a block shares a scale; name one, or leave block out"
    yield "scale", bits <= 8 or is_wide_right, wide
    yield "block", min(rows, columns) >= 0, "its rows and columns are positive numbers"
    yield (
        "tensor_scale",
        not is_rounded or c.block is not None,
        "the block is the tensor; name a smaller block",
    )
    yield "tensor_scale", not c.has_row_scales or c.block is None or (rows == 1 and columns != 0), a_row
    yield "tensor_scale", not columns or c.outer_columns % columns == 0, whole
    yield "headroom", not c.history, "a history leaves room by its margin"
    yield "candidates", among, f"two or more numbers above 0 and not above {largest:g} are needed"
    yield "candidates", is_rounded, of_rounded
    yield "candidates", columns != 0, fixed
    yield "correct", not is_rounded or (rows == 1 and columns != 0 and c.hadamard % columns == 0), group
    yield "scale_rule", (c.scale == "e8m0") == bool(c.scale_rule), e8m0
    yield "tensor_scale", is_rounded, f"it stands over block scales in {rounded}, as nvfp4 has them"
    yield "scale_target", c.tensor_scale != "none", under
    in_format = f"it must lie above 0 and not above {c.scale}'s largest number"
    yield "scale_target", not is_rounded or 0 <= c.scale_target <= format(c.scale).max, in_format
    yield "scale_rounding", is_rounded, rounds
    yield "zero_scale", is_rounded, rounds
    yield "headroom", 0 < c.headroom <= 2, "it must lie above 0 and not above 2"
    yield "headroom", c.scale != "e8m0" or c.scale_rule == "rceil", aims
    yield "power_of_two", fp32, "it cuts scales in fp32; leave it out"
    yield "correct", is_rounded, rounds
    yield "random_bits", 1 <= c.random_bits <= RANDOM_BITS, f"it must lie in 1 to {RANDOM_BITS}"
    yield "candidates", bool(c.choose), "a choice is missing; add choose = 'mae'"
    yield "choose", bool(c.candidates), "there are no candidates; add candidates = [6, 4]"


def _rules_of_values(c: Any) -> Iterator[Rule]:
    """The rules of what happens before blocks get scales, of amaxes over time, and of state."""
    fp32, is_tensor, size, signs = c.scale == "fp32", c.block is None, c.hadamard, c.signs
    share = "it is a share of channels, above 0 and below 1"
    nothing = "without keep_channels there is nothing to choose; leave it out"
    is_signs = signs in ((), "random") or (len(signs) == size and set(signs) <= {1, -1})
    some_signs = '"random" or one +1 or -1 for each element of a group are possible'
    of_tensor = (
        "histories, outliers and estimators are of the whole tensor; leave out history, refresh, outliers "
        "and estimator_k"
    )
    with_mean = "outliers and histories are of the tensor with its mean; leave one of them out"
    held = (
        "it holds the largest magnitude under tensor_scale = 'tensor', and scales of this cast are "
        "current; leave it out"
    )
    as_it_comes = "what is held is of the tensor as it comes; leave out hadamard, center and outliers"
    is_map = fp32 and c.rounding == "nearest-even" and not c.expand
    is_byte = fp32 and is_tensor and not c.history and c.element.bits == 8
    yield "keep_channels", 0 <= c.keep_channels < 1, share
    yield "keep_channels", bool(c.keep_cast), "their cast is missing; add keep_cast"
    yield "keep_steps", c.keep_steps >= 1, "it is a number of steps, one or more"
    yield "keep_steps", bool(c.keep_channels), nothing
    yield "keep_every", bool(c.keep_channels), nothing
    yield "keep_every", c.keep_every >= c.keep_steps, "it is a number of steps, at least keep_steps"
    yield "center_cast", bool(c.center), "no mean is taken away; add center = 'tokens'"
    yield "hadamard", size > 1 and not size & (size - 1), "it must be 0 or a power of two"
    yield "signs", is_signs, some_signs
    yield "outliers", 0.5 < c.outliers < 1, "it must be 0 or a quantile such as 0.99"
    yield "refresh", c.refresh > 1, "it is a number of steps, two or more"
    yield "history", c.history >= 0, "it must be a number of steps"
    yield "margin", 0 <= c.margin < 64, "it must lie in 0 to 63"
    yield "estimator_k", c.estimator_k >= 1, "it must be 0, or at least 1"
    yield "estimator_cap", c.estimator_cap > 0, "it must be positive"
    yield "keep_cast", c.is_scaled, "the cast itself is wide; leave the key out"
    yield "keep_channels", not (c.history or c.refresh or c.outliers or c.estimator_k), of_tensor
    yield "center", c.is_scaled, "it is for narrow elements; leave it out"
    yield "center", not (c.outliers or c.history), with_mean
    yield "refresh", c.tensor_scale == "tensor", held
    yield "refresh", not c.is_transformed, as_it_comes
    yield "history", fp32 and is_tensor, "it needs one fp32 scale a tensor"
    yield "estimator_k", fp32, "it needs fp32 scales"
    yield "expand", fp32 and not is_tensor, "it needs fp32 scales of blocks, as fp8-1x128 has"
    yield "codebook", is_map, "a map has fp32 scales and takes the nearest number"
    yield "prescale", is_byte, "it needs codes of a byte under one fp32 scale a tensor, as e4m3 has"

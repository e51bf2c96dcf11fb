"""What makes a cast valid: known names, the rules of each stage, and the rules that relate stages.

`cast.Cast` calls `require_valid` on construction.
"""

from typing import Any

from narrowgauge.errors import UserError, unknown
from narrowgauge.quantization.stages import Rules
from narrowgauge.quantization.stages.scales import FORMATS, ROUNDED
from narrowgauge.quantization.stages.state import CODEBOOKS


def require_valid(cast: Any) -> None:
    """Refuse a cast with an unknown name, a value out of bounds, or incompatible keys."""
    for stage in cast.stages:
        for what, (attribute, known) in stage.NAMES.items():
            if (name := getattr(stage, attribute)) not in known:
                raise unknown(what, str(name), filter(None, known))
    for key, is_right, rule in (
        *_rules_of_blocks(cast),
        *_rules_of_candidates(cast),
        *(rule for stage in cast.stages for rule in stage.rules()),
        *_rules_of_channels(cast),
        *_rules_of_state(cast),
    ):
        if not is_right:
            value = cast.values()[key]
            shown = value.name if key == "element" else value
            raise UserError(f"cast {cast.name!r}: {key} = {shown!r}, but {rule}")


def require_codes(cast: Any) -> None:
    """Refuse a cast whose elements are not scaled codes of at most a byte."""
    if cast.function:
        raise UserError(
            f"cast {cast.name!r} is a function, which gives values and no codes; call the function itself"
        )
    if not cast.is_scaled:
        raise UserError(f"cast {cast.name!r} stores no scales; use torch's .to() or narrowgauge.round_to")
    if cast.element.bits > 8 or cast.state.codebook:
        raise UserError(
            f"cast {cast.name!r} has no codes of a byte: it is for state (weight, master, grad, m, v)"
        )


def _rules_of_blocks(cast: Any) -> Rules:
    """(key, whether its value is valid, the rule) for elements, blocks and their scales."""
    scales, block, bits = cast.scales, cast.block, cast.element.bits
    has_outer = scales.outer != "none"
    has_rows = block is None or (block[0] == 1 and block[1] != 0)
    rows = "a row needs several blocks, and a block one row; name a block such as 16"
    divides = not scales.outer_columns or not block or not block[1] or scales.outer_columns % block[1] == 0
    return [
        (
            "function",
            not cast.function or not (cast.is_scaled or cast.transforms),
            "the function is the whole cast; leave the other keys out",
        ),
        ("element", cast.element.signed, "it is a format of scales; write it as the key scale"),
        ("scale", cast.is_scaled or bits > 8, f"narrow elements need one; name {', '.join(FORMATS[1:])}"),
        ("scale", cast.is_scaled or block is None, "a block shares a scale; name one, or leave block out"),
        (
            "scale",
            bits <= 8 or not cast.is_scaled or (scales.format == "fp32" and block is None and bits == 16),
            "elements of more than a byte have no scale, or with 16 bits one in fp32 a tensor",
        ),
        ("block", block is None or min(block) >= 0, "its rows and columns are positive numbers"),
        (
            "tensor_scale",
            not has_outer or scales.format not in ROUNDED or block is not None,
            "the block is the tensor; name a smaller block",
        ),
        ("tensor_scale", not scales.by_row or has_rows, rows),
        (
            "tensor_scale",
            divides,
            "this must be a whole number of blocks; name a multiple of the block's columns",
        ),
        ("headroom", scales.headroom == 1 or not cast.amax.history, "a history leaves room by its margin"),
    ]


def _rules_of_candidates(cast: Any) -> Rules:
    """The same for the choice between candidates and the correction of scales."""
    choice, scales, block = cast.choice, cast.scales, cast.block
    largest = cast.element.max
    is_fixed = block is not None and block[1] != 0
    is_group = is_fixed and block[0] == 1 and cast.hadamard.size % block[1] == 0
    of_rounded = f"they belong to scales in {', '.join(ROUNDED)}"
    in_range = len(choice.candidates) != 1 and all(0 < c <= largest for c in choice.candidates)
    return [
        ("candidates", in_range, f"two or more numbers above 0 and not above {largest:g} are needed"),
        ("candidates", not choice.candidates or scales.format in ROUNDED, of_rounded),
        ("candidates", not choice.candidates or is_fixed, "they need blocks of a fixed size, such as 16"),
        (
            "correct",
            not scales.correction or scales.format not in ROUNDED or is_group,
            "it needs blocks of one row that divide the size of the Hadamard transform, such as 16",
        ),
    ]


def _rules_of_channels(cast: Any) -> Rules:
    """The same for the stages that a tensor goes through before its blocks get scales."""
    channels, over_time = cast.channels, cast.amax
    as_it_comes = "what is held is of the tensor as it comes; leave out hadamard, center and outliers"
    whole = (
        "histories, outliers and estimators are of the whole tensor; leave out history, refresh, outliers "
        "and estimator_k"
    )
    remembers = over_time.history or over_time.refresh or cast.clamp.quantile or cast.estimator.k
    return [
        ("keep_cast", not channels.cast or cast.is_scaled, "the cast itself is wide; leave the key out"),
        ("keep_channels", not (channels.share and remembers), whole),
        ("center", not cast.mean.over or cast.is_scaled, "it is for narrow elements; leave it out"),
        (
            "center",
            not cast.mean.over or not (cast.clamp.quantile or over_time.history),
            "outliers and histories are of the tensor with its mean; leave one of them out",
        ),
        (
            "refresh",
            not over_time.refresh or cast.scales.outer == "tensor",
            "it holds the largest magnitude under tensor_scale = 'tensor', and scales of this cast are "
            "current; leave it out",
        ),
        ("refresh", not over_time.refresh or not cast.transforms, as_it_comes),
    ]


def _rules_of_state(cast: Any) -> Rules:
    """The same for histories, estimators and state, which need fp32 scales."""
    fp32, is_tensor, state = cast.scales.format == "fp32", cast.block is None, cast.state
    is_plain = fp32 and cast.rounding.mode == "nearest-even" and not state.expand
    is_byte = fp32 and is_tensor and not cast.amax.history and cast.element.bits == 8
    maps = f"{' and '.join(CODEBOOKS)} are possible, with fp32 scales and the nearest number"
    blocks = "it needs fp32 scales of blocks, as fp8-1x128 has"
    byte = "it needs codes of a byte under one fp32 scale a tensor, as e4m3 has"
    return [
        ("history", not cast.amax.history or (fp32 and is_tensor), "it needs one fp32 scale a tensor"),
        ("estimator_k", cast.estimator.k == 0 or fp32, "it needs fp32 scales"),
        ("expand", not state.expand or (fp32 and not is_tensor), blocks),
        ("codebook", not state.codebook or (state.codebook in CODEBOOKS and is_plain), maps),
        ("prescale", not state.prescale or is_byte, byte),
    ]

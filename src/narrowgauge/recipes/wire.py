"""The places on the wire: the formats in which weights and gradients are sent between devices.

**gather** Devices that each hold a shard of a weight gather the shards before a GEMM. Sending them in low
precision must change nothing: the GEMM has to see, bit for bit, what it would see of the full wide weight. So
a weight is sent in the cast that fprop.w and dgrad.w both have, if that cast has no scale or one for the full
tensor (agreed on beforehand, from the amax of all shards) and rounds to nearest. A quantized weight is sent
as its stored bytes. Anything else is sent in fp32.

**reduce** Devices add their gradients. Narrow formats are rounded after every addition here, so this place
changes the trajectory of a run on several devices (MS-AMP uses FP8 with scales that all devices share).
"""

from collections.abc import Sequence

from narrowgauge.errors import UserError
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.quantization.keys import Taker

WIDE = ("fp32", "bf16", "fp16")


def fitting_gather(requested: Cast, operands: Sequence[Cast], weight: Cast | None) -> Cast:
    """The requested cast if it changes no GEMM, else one that changes none: the weight's, or fp32."""
    if weight is not None and weight.name != "fp32":
        stored = weight.having(rounding="nearest-even", feedback="")
        return next((c for c in (requested, stored) if _keeps_stored(c, weight)), make_cast("fp32"))
    return requested if _keeps_products(requested, operands) else make_cast("fp32")


def require_gather(cast: Cast, operands: Sequence[Cast], weight: Cast | None, where: str) -> None:
    """Refuse to gather weights in values that the GEMMs would not use.

    Args:
        cast: The cast of the place `gather`.
        operands: The casts of fprop.w and dgrad.w at any time.
        weight: The cast that the weight is stored in.
        where: The recipe, for the error.

    Raises:
        UserError: GEMMs would not see the values of the full wide weight.
    """
    if cast.name == "fp32":
        return
    if weight is not None and weight.name != "fp32":
        if not _keeps_stored(cast, weight):
            raise UserError(
                f"{where}: gather = {cast.name!r}, but weights at rest in {weight.name!r} travel as they "
                'are; remove the key, or write gather = "fp32"'
            )
    elif not _keeps_products(cast, operands):
        seen = ", ".join(dict.fromkeys(repr(c.name) for c in operands))
        raise UserError(
            f"{where}: gather = {cast.name!r}, but weights can travel only in the cast that fprop.w and "
            f"dgrad.w both have at all times (here {seen}), with one scale a tensor or none, rounded to the "
            'nearest; write gather = "fp32"'
        )


def require_reduce(cast: Cast, where: str) -> None:
    """Refuse to add gradients in a format that would need rescaling after an addition."""
    scaled = cast.scale == "fp32" and cast.element.bits == 8
    if cast.unsupported(Taker.REDUCE) or not (scaled or cast.name in WIDE):
        raise UserError(
            f"{where}: reduce = {cast.name!r}, but gradients are added up in {', '.join(WIDE)}, or in "
            "codes of a byte under one fp32 scale a tensor, such as e4m3, each sum rounded to the nearest"
        )


def _keeps_stored(cast: Cast, weight: Cast) -> bool:
    """Whether a quantized weight keeps its values in this cast."""
    is_same = cast == weight.having(rounding=cast.rounding, feedback=cast.feedback)
    return cast.name == "fp32" or (is_same and weight.block is None)


def _keeps_products(cast: Cast, operands: Sequence[Cast]) -> bool:
    """Whether GEMMs see the same values of a weight sent in this cast as of one in fp32."""
    if cast.name == "fp32":
        return True
    is_one = cast.scale == "fp32" or not cast.is_scaled
    return is_one and not cast.unsupported(Taker.GATHER) and all(c == cast for c in operands)

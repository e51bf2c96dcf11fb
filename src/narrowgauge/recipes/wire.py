"""The places on the wire: the formats in which weights and gradients are sent between devices.

**gather** Devices that each hold a shard of a weight gather the shards before a GEMM. Sending them in low
precision must change nothing: the GEMM has to see, bit for bit, what it would see of the full wide weight. So
a weight is sent in the cast that fprop.w and dgrad.w both have, if that cast has no scale or one for the full
tensor (agreed on beforehand, from the amax of all shards) and rounds to nearest. A quantized weight is sent
as its stored bytes. Anything else is sent in fp32.

**reduce** Devices add their gradients. Narrow formats are rounded after every addition here, so this place
changes the trajectory of a run on several devices (MS-AMP uses FP8 with scales that all devices share).
"""

from collections.abc import Mapping, Sequence

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.recipes.rule import Rule

WIDE = ("fp32", "bf16", "fp16")


def weight_operands(casts: Mapping[str, Cast], rules: Sequence[Rule]) -> tuple[Cast, ...]:
    """The casts of a weight in GEMMs at any time, in layers that no rule selects by name or block.

    A GEMM that reuses another's values as they are has no separate cast.
    """
    of_rules = [r.casts for r in rules if r.is_for_all]
    places = (c[place] for c in (casts, *of_rules) for place in ("fprop.w", "dgrad.w") if place in c)
    return tuple(cast for cast in places if not cast.of or cast.is_scaled)


def fitting_gather(requested: Cast, operands: Sequence[Cast], weight: Cast | None) -> Cast:
    """The requested cast if it changes no GEMM, else one that changes none: the weight's, or fp32."""
    if weight is not None and weight.name != "fp32":
        stored = weight.having(rounding="nearest-even", feedback="")
        return next((c for c in (requested, stored) if keeps_stored(c, weight)), make_cast("fp32"))
    return requested if keeps_products(requested, operands) else make_cast("fp32")


def keeps_stored(cast: Cast, weight: Cast) -> bool:
    """Whether a quantized weight keeps its values in this cast."""
    is_same = cast == weight.having(rounding=cast.rounding, feedback=cast.feedback)
    return cast.name == "fp32" or (is_same and weight.block is None)


def keeps_products(cast: Cast, operands: Sequence[Cast]) -> bool:
    """Whether GEMMs see the same values of a weight sent in this cast as of one in fp32."""
    if cast.name == "fp32":
        return True
    is_one = cast.scale == "fp32" or not cast.is_scaled
    return is_one and not cast.unsupported(Consumer.GATHER) and all(c == cast for c in operands)

"""The places of a training step."""

from collections.abc import Mapping
from dataclasses import replace

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes.attention_places import ATTENTION, ATTENTION_PLACES, STREAM

GEMMS = ("fprop", "dgrad", "wgrad")
GEMM_PLACES = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# The place that quantized the same tensor before, whose values a place may reuse.
SEEN_BEFORE = {"dgrad.w": "fprop.w", "wgrad.x": "fprop.x", "wgrad.dy": "dgrad.dy"}
# The storage of state, by default: of the weights of linear layers, and the moments of every large tensor.
# "none" = no second, wider copy of a weight.
STATE_PLACES = ("weight", "master", "grad", "m", "v")
FP32 = make_cast("fp32")
WIDE_STATE: Mapping[str, Cast | None] = dict.fromkeys(STATE_PLACES, FP32) | {"master": None}
WIRE_PLACES = ("gather", "reduce")  # between devices: weights of linear layers, and their gradients
# For the tensor in each place of a linear layer: the dimension that remains in the GEMM's result, and the one
# that it contracts. M tokens, N outputs, K inputs.
DIMENSIONS = {
    "fprop.x": "MK",
    "saved": "MK",
    "fprop.w": "NK",
    "dgrad.dy": "MN",
    "dgrad.w": "KN",
    "wgrad.dy": "NM",
    "wgrad.x": "KM",
    **dict.fromkeys(STATE_PLACES, "NK"),
}
PLACES = (*GEMM_PLACES, *ATTENTION_PLACES, "saved", STREAM, *STATE_PLACES, *WIRE_PLACES)
#: The places that gauges measure, in table order. GEMM results have gauges, but recipes cannot name them.
RESULTS = ("fprop.y", "dgrad.dx", "wgrad.dw")
GAUGED_PLACES = (*GEMM_PLACES, *ATTENTION_PLACES, "saved", STREAM, *RESULTS, *STATE_PLACES)
OFFLOADABLE = ("master", "grad", "m", "v")
KEYS = (*PLACES, "offload", "compute", "keep")  # can be overridden in a recipe
COMPUTE = ("bf16", "fp16", "fp32")
# Names of several places, which take one cast for all of them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(place for place in PLACES if place.startswith(f"{group}.")) for group in (*GEMMS, ATTENTION)
}
CAST_TABLE = '{cast = "mxfp4", rounding = "stochastic"}'  # an example, for errors
# What may be kept of a layer's input for its backward pass, besides casts.
SAVED = ("input", "operand")
# Kept channels (`keep_channels`) are columns of a layer's input: the place that chooses them, the places that
# keep them, and the one that has no such channels itself, but is multiplied with those of wgrad.x.
CHOOSES = "fprop.x"
KEEPING = (CHOOSES, "fprop.w", "wgrad.x")
MEETS = "wgrad.dy"


def values_of(place: str) -> Cast:
    """The cast of a place that takes the values of another one as they are, in no format."""
    return replace(make_cast("bf16"), name=place, of=place)


def have_same_numbers(casts: Mapping[str, Cast], a: str, b: str) -> bool:
    """Whether two places see the same values of the same tensor, whatever the axis."""
    return casts[a] == casts[b] and casts[a].ignores_axis and not casts[a].is_random


def reuses(place: str, casts: Mapping[str, Cast], saved: str | Cast) -> bool:
    """Whether dgrad.w or wgrad.x uses the values of the forward pass, or something made from them."""
    is_kept = place != "wgrad.x" or isinstance(saved, str)
    return is_kept and (bool(casts[place].of) or have_same_numbers(casts, SEEN_BEFORE[place], place))


def wide_backward(casts: Mapping[str, Cast], saved: str | Cast) -> dict[str, Cast]:
    """The casts of a backward pass that rounds nothing, but starts from the same values as these casts.

    An operand made from values of the forward pass is those values as they are; any other is the tensor in
    fp32.
    """
    wide = dict.fromkeys((p for p in GEMM_PLACES if not p.startswith("fprop.")), FP32)
    for place in ("dgrad.w", "wgrad.x"):
        if reuses(place, casts, saved) or (place == "wgrad.x" and saved == "operand"):
            wide[place] = values_of(SEEN_BEFORE[place])
    return wide

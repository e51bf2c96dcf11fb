"""The places of a training step: operands of GEMMs and of attention, what is kept, state, and the wire.

Attention is two matmuls forward and four backward (`nn/transformer/attention_function.py`). A place names a
tensor, not a matmul: each tensor is an operand of two or three of them.

    attention.q    queries                q kᵀ, and ds ᵀ q
    attention.k    keys                   q kᵀ, and ds k
    attention.v    values                 p v, and do vᵀ
    attention.p    probabilities          p v, and pᵀ do
    attention.do   gradient of p v        pᵀ do, and do vᵀ
    attention.ds   gradient of q kᵀ       ds k, and dsᵀ q

Matmuls contract different axes of a tensor, so it is quantized for each, with blocks along the axis that this
matmul contracts. A place of attention that a recipe does not name is in `compute`. `stream` is the residual.

**gather** Devices that each hold a shard of a weight gather the shards before a GEMM. Sending them in low
precision must change nothing: the GEMM has to see, bit for bit, what it would see of the full wide weight. So
a weight is sent in the cast that fprop.w and dgrad.w both have, if that cast has no scale or one for the full
tensor (agreed on beforehand, from the amax of all shards) and rounds to nearest. A quantized weight is sent
as its stored bytes. Anything else is sent in fp32.

**reduce** Devices add their gradients. Narrow formats are rounded after every addition here, so this place
changes the trajectory of a run on several devices (MS-AMP uses FP8 with scales that all devices share).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.quantization.keys import Consumer

GEMMS = ("fprop", "dgrad", "wgrad")
GEMM_PLACES = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# The place that quantized the same tensor before, whose values a place may reuse.
SEEN_BEFORE = {"dgrad.w": "fprop.w", "wgrad.x": "fprop.x", "wgrad.dy": "dgrad.dy"}
ATTENTION = "attention"
ATTENTION_PLACES = tuple(f"attention.{tensor}" for tensor in ("q", "k", "v", "p", "do", "ds"))
GRADIENT_PLACES = ATTENTION_PLACES[4:]
#: The two operands of each matmul of attention: the forward pass first.
ATTENTION_PRODUCTS: Mapping[str, tuple[str, str]] = {
    "q kᵀ": ("attention.q", "attention.k"),
    "p v": ("attention.p", "attention.v"),
    "pᵀ do": ("attention.p", "attention.do"),
    "do vᵀ": ("attention.do", "attention.v"),
    "ds k": ("attention.ds", "attention.k"),
    "dsᵀ q": ("attention.ds", "attention.q"),
}
STREAM = "stream"
# The storage of state, by default: of the weights of linear layers, and the moments of every large tensor.
# "none" = no second, wider copy of a weight.
STATE_PLACES = ("weight", "master", "grad", "m", "v")
WIRE_PLACES = ("gather", "reduce")  # between devices: weights of linear layers, and their gradients
FP32 = make_cast("fp32")
#: The places that are in fp32 unless a recipe names them, whatever `compute` is.
IN_FP32: Mapping[str, Cast | None] = dict.fromkeys((STREAM, *STATE_PLACES, *WIRE_PLACES), FP32) | {
    "master": None
}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a recipe and its rules have in common: a cast for each of some places.

    Attributes:
        places: The casts by place; None for a master that does not exist, and in attention for `compute`.
    """

    places: Mapping[str, Cast | None]

    def __getitem__(self, place: str) -> Cast:
        """The cast of a place that has one, as in `recipe["stream"]`."""
        cast = self.places[place]
        assert cast is not None, place
        return cast

    @property
    def casts(self) -> dict[str, Cast]:
        """The casts of GEMM places."""
        return {place: self[place] for place in GEMM_PLACES if place in self.places}

    @property
    def attention(self) -> dict[str, Cast | None]:
        """The casts of places of attention; None for `compute`, as for a place that is missing."""
        return {place: self.places[place] for place in ATTENTION_PLACES if place in self.places}

    @property
    def state(self) -> dict[str, Cast | None]:
        """The casts of state places; None for a master that does not exist."""
        return {place: self.places[place] for place in STATE_PLACES if place in self.places}


def wide_operands(compute: str) -> dict[str, Cast | None]:
    """The places of GEMMs and of attention in the compute format."""
    return dict.fromkeys(ATTENTION_PLACES) | dict.fromkeys(GEMM_PLACES, make_cast(compute))


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


def is_wide(cast: Cast | None, compute: str) -> bool:
    """Whether a place of attention is in the compute format."""
    return cast is None or (not cast.is_scaled and cast.name == compute)


def weight_operands(*given: Mapping[str, Cast | None]) -> tuple[Cast, ...]:
    """The casts of a weight in GEMMs, of those that a recipe and its rules for all layers put into places.

    A GEMM that reuses another's values as they are has no separate cast.
    """
    found = (casts.get(place) for casts in given for place in ("fprop.w", "dgrad.w"))
    return tuple(cast for cast in found if cast is not None and (not cast.of or cast.is_scaled))


def fitting_gather(requested: Cast, operands: Sequence[Cast], weight: Cast) -> Cast:
    """The requested cast if it changes no GEMM, else one that changes none: the weight's, or fp32."""
    if weight.name != "fp32":
        stored = weight.having(rounding="nearest-even", feedback="")
        return next((c for c in (requested, stored) if keeps_stored(c, weight)), FP32)
    return requested if keeps_products(requested, operands) else FP32


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

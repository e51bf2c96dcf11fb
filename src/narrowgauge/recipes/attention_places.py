"""The places of attention and of the residual stream, and which casts they can have.

Attention is two matmuls forward and four backward (`nn/transformer/attention_function.py`). A place names a
tensor, not a matmul: each tensor is an operand of two or three of them.

    attention.q    queries                q kᵀ, and ds ᵀ q
    attention.k    keys                   q kᵀ, and ds k
    attention.v    values                 p v, and do vᵀ
    attention.p    probabilities          p v, and pᵀ do
    attention.do   gradient of p v        pᵀ do, and do vᵀ
    attention.ds   gradient of q kᵀ       ds k, and dsᵀ q

Matmuls contract different axes of a tensor, so it is quantized for each, with blocks along the axis that this
matmul contracts. A place that a recipe does not name is in `compute`.

`stream` is the residual: fp32 unless a recipe sets it.
"""

from collections.abc import Iterable, Mapping

from narrowgauge.errors import UserError, unknown
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.quantization.keys import Taker

ATTENTION = "attention"
ATTENTION_PLACES = tuple(f"attention.{tensor}" for tensor in ("q", "k", "v", "p", "do", "ds"))
GRADIENT_PLACES = ATTENTION_PLACES[4:]
#: The two operands of each matmul: the forward pass first.
ATTENTION_PRODUCTS: Mapping[str, tuple[str, str]] = {
    "q kᵀ": ("attention.q", "attention.k"),
    "p v": ("attention.p", "attention.v"),
    "pᵀ do": ("attention.p", "attention.do"),
    "do vᵀ": ("attention.do", "attention.v"),
    "ds k": ("attention.ds", "attention.k"),
    "dsᵀ q": ("attention.ds", "attention.q"),
}
#: What a rule gives the layers that it keeps wide: everything in `compute`.
ALL_WIDE: Mapping[str, Cast | None] = dict.fromkeys(ATTENTION_PLACES, None)
STREAM = "stream"


def attention_casts(place: str, cast: Cast) -> dict[str, Cast]:
    """The casts that a recipe puts in a place of attention; `attention` alone is all six.

    Raises:
        UserError: There is no such place, or it cannot have the cast.
    """
    places = ATTENTION_PLACES if place == ATTENTION else (place,)
    if place not in (ATTENTION, *ATTENTION_PLACES):
        raise unknown("recipe place", place, (ATTENTION, *ATTENTION_PLACES))
    _refuse_state(place, cast)
    _refuse(place, cast, Taker.ATTENTION, "attention takes every scale from the tensor at hand, as it comes")
    if cast.signs == "random":
        raise UserError(
            f'recipe place {place!r}: signs = "random", but transforms of attention have fixed signs; leave '
            "the key out"
        )
    return dict.fromkeys(places, cast)


def stream_cast(cast: Cast) -> Cast:
    """The cast of the residual stream.

    Raises:
        UserError: The stream cannot have it.
    """
    _refuse_state(STREAM, cast)
    _refuse(STREAM, cast, Taker.STREAM, "the stream is read as it is by every layer after")
    return cast


def _refuse(place: str, cast: Cast, taker: Taker, why: str) -> None:
    for key in cast.unsupported(taker):
        value = cast.values()[key]
        raise UserError(f"recipe place {place!r}: {key} = {value!r}, but {why}; leave the key out")


def _refuse_state(place: str, cast: Cast) -> None:
    if cast.is_for_state:
        raise UserError(
            f"recipe place {place!r}: cast {cast.name!r} is for state, not for a GEMM operand; "
            "use one such as e4m3 or mxfp8"
        )


def is_wide(cast: Cast | None, compute: str) -> bool:
    """Whether a place is in the compute format."""
    return cast is None or (not cast.is_scaled and cast.name == compute)


def require_attention(attention: Mapping[str, Cast | None], where: str) -> None:
    """Refuse a matmul of attention with only one operand transformed.

    In the backward pass, a matmul whose gradient is not narrow takes the other operand unquantized.
    """
    for product, (a, b) in ATTENTION_PRODUCTS.items():
        gradient = attention.get(a if a.endswith((".do", ".ds")) else b)
        is_backward = "do" in product or "ds" in product
        if is_backward and (gradient is None or not gradient.is_scaled):
            continue
        sizes = [0 if cast is None else cast.hadamard for cast in (attention.get(a), attention.get(b))]
        signs = [() if cast is None else cast.signs for cast in (attention.get(a), attention.get(b))]
        if sizes[0] != sizes[1] or signs[0] != signs[1]:
            raise UserError(
                f"{where}: hadamard = {sizes[0]} in {a} and {sizes[1]} in {b}, but their product stays the "
                "same only if both are transformed alike; give both places the same size and signs"
            )


def operands_of_attention(
    mappings: Iterable[Mapping[str, Cast | None]], compute: str
) -> list[tuple[str, tuple[str, str], tuple[Cast, Cast]]]:
    """(matmul, its places, their casts) for each matmul and each mapping of casts, without repeats."""
    wide = make_cast(compute)
    found: dict[tuple[str, tuple[str, str], tuple[Cast, Cast]], None] = {}
    for casts in mappings:
        for product, (a, b) in ATTENTION_PRODUCTS.items():
            found[product, (a, b), (casts.get(a) or wide, casts.get(b) or wide)] = None
    return sorted(found, key=lambda one: list(ATTENTION_PRODUCTS).index(one[0]))

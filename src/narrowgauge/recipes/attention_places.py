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

from collections.abc import Mapping

from narrowgauge.quantization import Cast

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


def is_wide(cast: Cast | None, compute: str) -> bool:
    """Whether a place is in the compute format."""
    return cast is None or (not cast.is_scaled and cast.name == compute)

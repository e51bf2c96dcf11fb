"""How does a tensor become narrow numbers? Blocks, scales, Hadamard, and the casts that exist."""

from narrowgauge.quantization.cast import Cast, cast, cast_names, make_cast
from narrowgauge.quantization.quantize import QTensor, emulate, quantize

__all__ = ["Cast", "QTensor", "cast", "cast_names", "emulate", "make_cast", "quantize"]

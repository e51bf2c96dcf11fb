"""What is the right answer? Quantization in exact rational arithmetic, slow and obvious."""

from oracle.quantize import ReferenceTensor, reference_quantize

__all__ = ["ReferenceTensor", "reference_quantize"]

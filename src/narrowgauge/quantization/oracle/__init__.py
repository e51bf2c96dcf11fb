"""What is the right answer? Quantization in exact rational arithmetic, slow and obvious."""

from narrowgauge.quantization.oracle.quantize import ReferenceTensor, reference_quantize
from narrowgauge.quantization.oracle.scales import delayed_scale

__all__ = ["ReferenceTensor", "delayed_scale", "reference_quantize"]

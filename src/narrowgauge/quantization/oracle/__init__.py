"""What is the right answer? Quantization in exact rational arithmetic, slow and obvious."""

from narrowgauge.quantization.oracle.quantize import reference_quantize
from narrowgauge.quantization.oracle.scales import delayed_scale
from narrowgauge.quantization.oracle.tensor import ReferenceTensor

__all__ = ["ReferenceTensor", "delayed_scale", "reference_quantize"]

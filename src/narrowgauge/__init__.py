"""narrowgauge: pre-train language models in narrow numbers, and see what the narrow numbers did.

Every tensor of a training step has a place; a recipe says which number format each place is in.
"""

from narrowgauge.formats import Format, format, format_names, round_to
from narrowgauge.quantization import QTensor, quantize

__all__ = ["Format", "QTensor", "format", "format_names", "quantize", "round_to"]

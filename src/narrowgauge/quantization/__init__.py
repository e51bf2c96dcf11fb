"""How does a tensor become narrow numbers? Blocks, scales, transforms, remedies, and the casts that exist."""

from narrowgauge.quantization.at_rest import AtRest
from narrowgauge.quantization.cast import Cast, cast, cast_names, make_cast, state_cast_names
from narrowgauge.quantization.part import Axis, Part, whole_axis
from narrowgauge.quantization.prescale import PreScale
from narrowgauge.quantization.quantize import QTensor, emulate, quantize
from narrowgauge.quantization.remedies import clamp_outliers, estimator_slope

__all__ = [
    "AtRest",
    "Axis",
    "Cast",
    "Part",
    "PreScale",
    "QTensor",
    "cast",
    "cast_names",
    "clamp_outliers",
    "emulate",
    "estimator_slope",
    "make_cast",
    "quantize",
    "state_cast_names",
    "whole_axis",
]

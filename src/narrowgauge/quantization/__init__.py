"""How does a tensor become narrow numbers? Blocks, scales, transforms, remedies, and the casts that exist."""

from narrowgauge.quantization.cast import Cast, cast, cast_names, make_cast, state_cast_names
from narrowgauge.quantization.outliers import clamp_outliers, estimator_slope
from narrowgauge.quantization.quantize import QTensor, emulate, quantize
from narrowgauge.quantization.sharding.shard import ShardAxis, TensorShard, full_axis
from narrowgauge.quantization.state.prescale import PreScale
from narrowgauge.quantization.state.quantized_state import QuantizedState

__all__ = [
    "Cast",
    "PreScale",
    "QTensor",
    "QuantizedState",
    "ShardAxis",
    "TensorShard",
    "cast",
    "cast_names",
    "clamp_outliers",
    "emulate",
    "estimator_slope",
    "full_axis",
    "make_cast",
    "quantize",
    "state_cast_names",
]

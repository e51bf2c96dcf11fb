"""How does a tensor become narrow numbers? Blocks, scales, transforms, remedies, and the casts that exist."""

from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.named_casts import cast, cast_names, make_cast, state_cast_names
from narrowgauge.quantization.outliers import clamp_outliers
from narrowgauge.quantization.quantize import QTensor, emulate, quantize, quantize_in_context
from narrowgauge.quantization.rounding_gradient import estimator_slope
from narrowgauge.quantization.sharding.shard import ShardAxis, TensorShard, full_axis
from narrowgauge.quantization.state.prescale import PreScale
from narrowgauge.quantization.state.quantized_state import QuantizedState

__all__ = [
    "DEFAULT_CONTEXT",
    "Cast",
    "PreScale",
    "QTensor",
    "QuantContext",
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
    "quantize_in_context",
    "state_cast_names",
]

"""How does a tensor become narrow numbers? Blocks, scales, transforms, remedies, and the casts that exist."""

from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import DEFAULT_CONTEXT, QuantContext
from narrowgauge.quantization.named_casts import (
    cast,
    cast_keys,
    cast_names,
    is_cast_table,
    make_cast,
    state_cast_names,
)
from narrowgauge.quantization.outliers import (
    clamp_outliers,
    kept_count,
    largest_channels,
    local_channels,
    squared_norms,
)
from narrowgauge.quantization.quantize import QTensor, emulate, quantize, quantize_in_context
from narrowgauge.quantization.rounding_gradient import estimator_slope
from narrowgauge.quantization.sharding.shard import ShardAxis, TensorShard, full_axis
from narrowgauge.quantization.state.gradient_state import GradientState
from narrowgauge.quantization.state.parameter_state import (
    ParamState,
    ensure_state,
    gradient_of,
    has_gradient,
    like_shard,
    local_part,
    local_tensor,
    master_or_weight,
    plain_gradient,
    shard_of,
    state_of,
    stored_tensor,
    write_weight,
)
from narrowgauge.quantization.state.prescale import PreScale
from narrowgauge.quantization.state.quantized_state import QuantizedState

__all__ = [
    "DEFAULT_CONTEXT",
    "Cast",
    "GradientState",
    "ParamState",
    "PreScale",
    "QTensor",
    "QuantContext",
    "QuantizedState",
    "ShardAxis",
    "TensorShard",
    "cast",
    "cast_keys",
    "cast_names",
    "clamp_outliers",
    "emulate",
    "ensure_state",
    "estimator_slope",
    "full_axis",
    "gradient_of",
    "has_gradient",
    "is_cast_table",
    "kept_count",
    "largest_channels",
    "like_shard",
    "local_channels",
    "local_part",
    "local_tensor",
    "make_cast",
    "master_or_weight",
    "plain_gradient",
    "quantize",
    "quantize_in_context",
    "shard_of",
    "squared_norms",
    "state_cast_names",
    "state_of",
    "stored_tensor",
    "write_weight",
]

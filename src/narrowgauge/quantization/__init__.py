"""How is a tensor quantized? Blocks, scales, transforms, outlier handling, and the named casts."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.quantization.cast import Cast as Cast
    from narrowgauge.quantization.context import DEFAULT_CONTEXT as DEFAULT_CONTEXT
    from narrowgauge.quantization.context import QuantContext as QuantContext
    from narrowgauge.quantization.named_casts import cast as cast
    from narrowgauge.quantization.named_casts import cast_keys as cast_keys
    from narrowgauge.quantization.named_casts import cast_names as cast_names
    from narrowgauge.quantization.named_casts import is_cast_table as is_cast_table
    from narrowgauge.quantization.named_casts import make_cast as make_cast
    from narrowgauge.quantization.named_casts import register_cast as register_cast
    from narrowgauge.quantization.named_casts import state_cast_names as state_cast_names
    from narrowgauge.quantization.quantize import QTensor as QTensor
    from narrowgauge.quantization.quantize import emulate as emulate
    from narrowgauge.quantization.quantize import estimator_slope as estimator_slope
    from narrowgauge.quantization.quantize import operand_dtype as operand_dtype
    from narrowgauge.quantization.quantize import quantize as quantize
    from narrowgauge.quantization.quantize import quantize_in_context as quantize_in_context
    from narrowgauge.quantization.scales import rounded_sqrt as rounded_sqrt
    from narrowgauge.quantization.sharding.shard import ShardAxis as ShardAxis
    from narrowgauge.quantization.sharding.shard import TensorShard as TensorShard
    from narrowgauge.quantization.sharding.shard import full_axis as full_axis
    from narrowgauge.quantization.state.gradient_state import GradientState as GradientState
    from narrowgauge.quantization.state.gradient_state import PreScale as PreScale
    from narrowgauge.quantization.state.narrow_tensor import NarrowTensor as NarrowTensor
    from narrowgauge.quantization.state.parameter_state import ParamState as ParamState
    from narrowgauge.quantization.state.parameter_state import ensure_state as ensure_state
    from narrowgauge.quantization.state.parameter_state import gradient_of as gradient_of
    from narrowgauge.quantization.state.parameter_state import has_gradient as has_gradient
    from narrowgauge.quantization.state.parameter_state import local_part as local_part
    from narrowgauge.quantization.state.parameter_state import local_tensor as local_tensor
    from narrowgauge.quantization.state.parameter_state import master_or_weight as master_or_weight
    from narrowgauge.quantization.state.parameter_state import plain_gradient as plain_gradient
    from narrowgauge.quantization.state.parameter_state import shard_of as shard_of
    from narrowgauge.quantization.state.parameter_state import state_of as state_of
    from narrowgauge.quantization.state.parameter_state import stored_tensor as stored_tensor
    from narrowgauge.quantization.state.parameter_state import write_weight as write_weight
    from narrowgauge.quantization.state.quantized_state import QuantizedState as QuantizedState
    from narrowgauge.quantization.transforms import clamp_outliers as clamp_outliers
    from narrowgauge.quantization.transforms import kept_count as kept_count
    from narrowgauge.quantization.transforms import largest_channels as largest_channels
    from narrowgauge.quantization.transforms import local_channels as local_channels
    from narrowgauge.quantization.transforms import squared_norms as squared_norms
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)

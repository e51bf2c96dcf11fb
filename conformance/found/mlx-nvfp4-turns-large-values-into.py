"""mlx 0.32.4: NVFP4 turns large values into zeros.

Without `global_scale`, a value above 2^31 times its scale should saturate to 6 x 448 = 2688, as 1e10 does.
"""

import mlx.core as mx

for value in (1e10, 1e13):
    codes, scales = mx.quantize(mx.full((1, 32), value), mode="nvfp4")
    print(value, mx.dequantize(codes, scales, mode="nvfp4", dtype=mx.float32)[0, 0].item())
# prints:
#   10000000000.0 2688.0
#   10000000000000.0 0.0

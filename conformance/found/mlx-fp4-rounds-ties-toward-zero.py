"""mlx 0.32.4: FP4 rounds ties toward zero.

MX 6.3 and 754, in `mxfp4` and `nvfp4` of the CPU backend.
"""

import mlx.core as mx

made = mx.quantize(mx.array([[6.0, 0.75, 1.75, 3.5] * 8]), mode="mxfp4")
print(mx.dequantize(*made, mode="mxfp4", dtype=mx.float32)[0, :4].tolist())  # due: 6, 1, 2, 4
# prints:
#   [6.0, 0.5, 1.5, 3.0]

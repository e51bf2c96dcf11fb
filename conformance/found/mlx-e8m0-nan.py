"""mlx 0.32.4: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

mlx 0.32.4, CPU backend.
"""

import mlx.core as mx

codes = mx.full((1, 4), 0x11111111, dtype=mx.uint32)  # 32 codes of 0.5
scales = mx.array([[255]], dtype=mx.uint8)
print(mx.dequantize(codes, scales, mode="mxfp4", dtype=mx.float32)[0, :2].tolist())  # due: nan
# prints:
#   [inf, inf]

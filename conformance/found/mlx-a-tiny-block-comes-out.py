"""mlx 0.32.4: a tiny block comes out as infinity.

CPU backend, `mode="mxfp8"` from a largest magnitude of 2^-120 down, `mxfp4` from 2^-126 down. MX 5.4.1: the
least exponent is -127, code 0. The exponent wraps to 255, 254 and so on. The Metal kernel clamps it
(`backend/metal/kernels/fp8.h`, `fp8_e8m0`).
"""

import mlx.core as mx

for e in (-119, -120, -121):
    codes, scales = mx.quantize(mx.full((1, 32), 2.0**e), mode="mxfp8")
    value = mx.dequantize(codes, scales, mode="mxfp8", dtype=mx.float32)[0, 0].item()
    print(e, scales.item(), value / 2.0**e)
# prints:
#   -119 0 1.0
#   -120 255 inf
#   -121 254 inf

"""mlx: MXFP4, MXFP8 and NVFP4 of its CPU backend."""

import mlx.core as mx
import numpy as np
from shared import installed, is_mx, is_nvfp4, packed, unpacked

version = installed("mlx")
REQUIRES = ["mlx==0.32.4", "mlx-cpu==0.32.4"]


def mode(cast):
    """The name of a cast there."""
    if is_mx(cast, ["e2m1"], ["rceil"]):
        return "mxfp4"
    if is_mx(cast, ["e4m3"], ["rceil"]):
        return "mxfp8"
    if is_nvfp4(cast) or is_nvfp4(cast, None):
        return "nvfp4"
    raise NotImplementedError


def quantize(x, cast):
    """Codes and scales of `mlx.core.quantize`."""
    outer = {"global_scale": mx.array(np.abs(x).max())} if is_nvfp4(cast) else {}
    codes, scales = mx.quantize(mx.array(x), mode=mode(cast), **outer)
    codes = np.array(codes).view(np.uint8)
    codes = codes if cast["element"] == "e4m3" else unpacked(codes)
    second = (np.abs(x).max() / np.float32(2688),) if outer else ()
    return codes, np.array(scales), *second


def dequantize(codes, scales, cast):
    """Values of stored codes in float32."""
    if is_nvfp4(cast):
        raise NotImplementedError
    stored = codes if cast["element"] == "e4m3" else packed(codes)
    words = mx.array(np.ascontiguousarray(stored).view(np.uint32))
    return np.array(mx.dequantize(words, mx.array(scales), mode=mode(cast), dtype=mx.float32))

"""llama.cpp: ggml's C in the wheel of xllamacpp, whose version ends in the build of llama.cpp.

MXFP4 and NVFP4 are written by `quantize_row_*_ref` and read by `dequantize_row_*`. NVFP4 has no tensor scale
there; a model's file keeps one beside the weight.
"""

import ctypes
from importlib.util import find_spec

import numpy as np
from shared import installed, is_mx, is_nvfp4, joined_halves, split_halves

version = installed("xllamacpp")
REQUIRES = ["xllamacpp==2026.10.11549"]
ggml = ctypes.CDLL(find_spec("xllamacpp.xllamacpp").origin)


def call(name, values, made):
    """An array that a C function of (from, to, number of values) fills from another."""
    function = getattr(ggml, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    count = values.size if values.dtype == np.float32 else made.size
    function(values.ctypes.data, made.ctypes.data, count)
    return made


def quantize(x, cast):
    """Codes and scales; the row of a tensor fills a block of NVFP4 twice."""
    if is_mx(cast, ["e2m1"], ["floor"]):
        blocks = call("quantize_row_mxfp4_ref", x.copy(), np.zeros((x.size // 32, 17), np.uint8))
        return split_halves(blocks[:, 1:], 16).reshape(x.shape), blocks[:, 0]
    if is_nvfp4(cast, None) and x.shape[1] == 32:
        blocks = call("quantize_row_nvfp4_ref", np.tile(x, 2), np.zeros((len(x), 36), np.uint8))
        return split_halves(blocks[:, 4:], 8)[:, :32], blocks[:, :2]
    raise NotImplementedError


def dequantize(codes, scales, cast):
    """Values of stored codes."""
    if is_mx(cast, ["e2m1"], ["floor"]):
        blocks = np.concatenate([scales.reshape(-1, 1), joined_halves(codes.reshape(-1, 32), 16)], -1)
        return call("dequantize_row_mxfp4", blocks, np.zeros(codes.shape, np.float32))
    if is_nvfp4(cast, None) and codes.shape[1] == 32:
        blocks = np.concatenate([scales, scales, joined_halves(np.tile(codes, 2), 8)], -1)
        return call("dequantize_row_nvfp4", blocks, np.zeros((len(codes), 64), np.float32))[:, :32]
    raise NotImplementedError

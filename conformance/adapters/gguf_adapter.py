"""gguf, llama.cpp's package in NumPy: MXFP4 written and read, NVFP4 (without a tensor scale) read."""

import gguf
import numpy as np
from gguf.quants import dequantize as read
from gguf.quants import quantize as write
from shared import installed, is_mx, is_nvfp4, joined_halves, split_halves

version = installed("gguf")
REQUIRES = ["gguf==0.19.0"]
MXFP4, NVFP4 = gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.NVFP4


def quantize(x, cast):
    """Codes and scales of `gguf.quants.quantize`."""
    if not is_mx(cast, ["e2m1"], ["floor"]):
        raise NotImplementedError
    blocks = write(x, MXFP4).reshape(-1, 17)
    return split_halves(blocks[:, 1:], 16).reshape(x.shape), blocks[:, 0]


def dequantize(codes, scales, cast):
    """Values of stored codes; a block of NVFP4 is four of 16 codes."""
    if is_mx(cast, ["e2m1"], ["floor"]):
        blocks = np.concatenate([scales.reshape(-1, 1), joined_halves(codes.reshape(-1, 32), 16)], -1)
        return read(blocks.reshape(len(codes), -1), MXFP4)
    if is_nvfp4(cast, None) and codes.shape[1] == 32:
        blocks = np.concatenate([scales, scales, joined_halves(np.tile(codes, 2), 8)], -1)
        return read(blocks, NVFP4)[:, :32]
    raise NotImplementedError

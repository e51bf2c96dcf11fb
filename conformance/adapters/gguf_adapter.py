"""gguf, llama.cpp's package in NumPy: MXFP4 written and read, NVFP4 (without a tensor scale) read."""

import gguf
import numpy as np
from gguf.quants import dequantize as read
from gguf.quants import quantize as write
from shared import installed, is_mx, is_nvfp4

version = installed("gguf")
REQUIRES = ["gguf==0.19.0"]
MXFP4, NVFP4 = gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.NVFP4


def quantize(x, cast):
    """Codes and scales of `gguf.quants.quantize`: a scale, 16 codes in low halves, 16 in high ones."""
    if not is_mx(cast, ["e2m1"], ["floor"]):
        raise NotImplementedError
    blocks = write(x, MXFP4).reshape(-1, 17)
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], -1)
    return codes.reshape(x.shape), blocks[:, 0]


def dequantize(codes, scales, cast):
    """Values of stored codes; a block of NVFP4 is four of 16 codes."""
    if is_mx(cast, ["e2m1"], ["floor"]):
        halves = codes.reshape(-1, 2, 16)
        blocks = np.concatenate([scales.reshape(-1, 1), halves[:, 0] | halves[:, 1] << 4], -1)
        return read(blocks.reshape(len(codes), -1).astype(np.uint8), MXFP4)
    if is_nvfp4(cast, None) and codes.shape[1] == 32:
        halves = np.tile(codes, 2).reshape(-1, 4, 2, 8)
        inner = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), 32)
        blocks = np.concatenate([np.tile(scales, 2), inner], -1).astype(np.uint8)
        return read(blocks, NVFP4)[:, :32]
    raise NotImplementedError

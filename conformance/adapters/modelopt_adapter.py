"""NVIDIA's ModelOpt: its stored tensors of MXFP4, MXFP8, NVFP4 and FP8, computed on a CPU."""

import numpy as np
import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from shared import installed, is_fp8, is_mx, is_nvfp4, packed, unpacked

version = installed("nvidia-modelopt")
REQUIRES = ["nvidia-modelopt==0.47.0", "pulp", "torchprofile", "ninja", "nvidia-ml-py", "omegaconf"]
REQUIRES += ["antlr4-python3-runtime==4.9.3"]


def quantize(x, cast):
    """Codes and scales of `quantize` of the tensor classes."""
    data = torch.from_numpy(x.copy())
    if is_mx(cast, ["e2m1"], ["rceil"]):
        made, scales = MXFP4QTensor.quantize(data, 32)
        return unpacked(made._quantized_data), scales.numpy()
    if is_mx(cast, ["e4m3"], ["rceil"]):
        made, scales = MXFP8QTensor.quantize(data)
        return made._quantized_data.view(torch.uint8).numpy(), scales.numpy()
    if is_nvfp4(cast):
        made, scales, outer = NVFP4QTensor.quantize(data, 16)
        return unpacked(made._quantized_data), scales.view(torch.uint8).numpy(), outer.numpy()
    if is_fp8(cast, None, [1, 0], [1, 128]):
        block = cast.get("block")
        given = {"block_sizes": {-1: 128}} if block == [1, 128] else {"axis": 0 if block else None}
        made, scales = FP8QTensor.quantize(data, **given)
        return made._quantized_data.view(torch.uint8).numpy(), scales.numpy()
    raise NotImplementedError


def dequantize(codes, scales, cast):
    """Values of stored codes."""
    kept = torch.from_numpy(scales)
    if is_mx(cast, ["e2m1"], ["rceil"]):
        made = MXFP4QTensor(torch.Size(codes.shape), torch.float32, torch.from_numpy(packed(codes)))
        return made.dequantize(torch.float32, scale=kept, block_sizes={-1: 32}).numpy()
    if is_mx(cast, ["e4m3"], ["rceil"]):
        stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        made = MXFP8QTensor(torch.Size(codes.shape), torch.float32, stored)
        return made.dequantize(torch.float32, scale=kept, block_sizes={-1: 32}).numpy()
    if is_nvfp4(cast):
        made = NVFP4QTensor(torch.Size(codes.shape), torch.float32, torch.from_numpy(packed(codes)))
        given = {"scale": kept.view(torch.float8_e4m3fn), "double_scale": torch.tensor(1.0)}
        return np.asarray(made.dequantize(torch.float32, **given, block_sizes={-1: 16}))
    raise NotImplementedError

"""torchao against the vectors: `python -m narrowgauge.conformance conformance/adapters/torchao_adapter.py`.

Written for torchao 0.18.0. It has MX with four scale rules, FP8 under one fp32 scale a tensor or row, and
NVFP4 under a tensor scale. All of it runs on a CPU.
"""

import numpy as np
import torch
from shared import installed, is_mx, is_nvfp4, is_single, packed
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import (
    f32_to_f4_unpacked,
    f32_to_f6_e2m3_unpacked,
    f32_to_f6_e3m2_unpacked,
)
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

version = installed("torchao")
REQUIRES = ["torchao==0.18.0"]
FP8 = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
MX = {"e4m3": FP8["e4m3"], "e5m2": FP8["e5m2"], "e2m1": torch.float4_e2m1fn_x2}
MX |= {"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2"}
SINGLE = {"e2m1": f32_to_f4_unpacked, "e2m3": f32_to_f6_e2m3_unpacked, "e3m2": f32_to_f6_e3m2_unpacked}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The keys of a cast that are read here. One with another key is something that torchao does not have.
READ = {"name", "element", "scale", "scale_rule", "block", "tensor_scale", "power_of_two", "input"}


def quantize(x, cast):
    """Codes and scales as torchao computes them."""
    if is_single(cast, [*FP8, *SINGLE]):
        return single(x, cast["element"])
    if set(cast) - READ:
        raise NotImplementedError
    data = torch.from_numpy(x).to(DTYPES[cast["input"]]).contiguous()
    match cast["scale"], cast.get("block"):
        case "fp32", None | [1, 0]:
            return fp8(data, cast)
        case "e8m0", [1, 32] if cast["element"] in MX:
            return mx(data, cast)
        case "e4m3", [1, 16] if cast.get("tensor_scale") == "tensor":
            return nvfp4(data)
    raise NotImplementedError


def single(x, element):
    """Values one by one: FP8 by `to_fp8_saturated`, the narrower formats by bit patterns."""
    if element in FP8:
        return to_fp8_saturated(torch.from_numpy(x), FP8[element]).view(torch.uint8).numpy(), np.empty(0)
    return SINGLE[element](torch.from_numpy(x)).numpy(), np.empty(0)


def dequantize(codes, scales, cast):
    """Values of stored codes, by `to_dtype` and by NVFP4's tensor under the tensor scale 1."""
    if is_mx(cast, MX, ["floor"]):
        stored = torch.from_numpy(packed(codes) if cast["element"] == "e2m1" else codes)
        kind = MX[cast["element"]]
        stored = stored if isinstance(kind, str) else stored.view(kind)
        factors = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
        return to_dtype(stored, factors, kind, 32, torch.float32).numpy()
    if is_nvfp4(cast):
        factors = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        made = NVFP4Tensor(torch.from_numpy(packed(codes)), factors, 16, torch.float32)
        return made.dequantize(torch.float32).numpy()
    raise NotImplementedError


def fp8(data, cast):
    """`hp_tensor_to_float8_dynamic`: one scale a tensor, or one a row."""
    if cast["element"] not in FP8:
        raise NotImplementedError
    dtype = FP8[cast["element"]]
    amax = data.abs().amax() if cast.get("block") is None else data.abs().amax(-1, keepdim=True)
    encode = amax_to_scale(amax, dtype, cast.get("power_of_two", False))
    codes = to_fp8_saturated(data.float() * encode, dtype)
    return codes.view(torch.uint8).numpy(), encode.reciprocal().numpy()


def padded(data, size):
    """Columns filled with zeros up to a multiple of the block."""
    return torch.nn.functional.pad(data, (0, -data.shape[1] % size)).contiguous()


def mx(data, cast):
    """`to_mx`, which packs two FP4 codes a byte."""
    mode = ScaleCalculationMode[cast["scale_rule"].upper()]
    scales, codes = to_mx(padded(data, 32), MX[cast["element"]], 32, mode)
    codes = codes.view(torch.uint8)
    if cast["element"] == "e2m1":
        codes = unpacked(codes)
    return codes[:, : data.shape[1]].numpy(), scales.view(torch.uint8).numpy()


def nvfp4(data):
    """`nvfp4_quantize` under the scale that torchao makes of the tensor's largest magnitude."""
    second = per_tensor_amax_to_scale(data.abs().amax().float())
    scales, codes = nvfp4_quantize(padded(data, 16), 16, second)
    return unpacked(codes)[:, : data.shape[1]].numpy(), scales.view(torch.uint8).numpy(), np.float32(second)


def unpacked(codes):
    """Two codes of each byte, the low half first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)

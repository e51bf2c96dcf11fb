"""compressed-tensors: MX under its own rule (even), NVFP4 under a tensor scale, FP8 a tensor or a row."""

import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as multiply
from compressed_tensors.quantization.lifecycle.forward import quantize as divide
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from shared import e2m1_codes, installed, is_fp8, is_mx, is_nvfp4, packed

version = installed("compressed-tensors")
REQUIRES = ["compressed-tensors==0.20.0"]
FLOAT = {"type": "float", "symmetric": True}
MX = {"e2m1": 4, "e2m3": 6, "e4m3": 8}


def scheme(cast):
    """The arguments of a cast, as a checkpoint's config has them."""
    if is_mx(cast, MX, ["even"]):
        bits = MX[cast["element"]]
        return QuantizationArgs(
            num_bits=bits,
            strategy="group",
            group_size=32,
            scale_dtype=torch.uint8,
            zp_dtype=torch.uint8,
            **FLOAT,
        )
    if is_nvfp4(cast):
        kind = torch.float8_e4m3fn
        return QuantizationArgs(
            num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=kind, zp_dtype=kind, **FLOAT
        )
    if is_fp8(cast, None, [1, 0]):
        return QuantizationArgs(num_bits=8, strategy="channel" if cast.get("block") else "tensor", **FLOAT)
    raise NotImplementedError


def quantize(x, cast):
    """Codes and scales under the scales that its observers compute."""
    args, data = scheme(cast), torch.from_numpy(x)
    width = (cast.get("block") or [0, 0])[1]
    blocks = data.unflatten(-1, (-1, width)) if width else data if cast.get("block") else data.reshape(1, -1)
    least, most = blocks.amin(-1, keepdim=not width), blocks.amax(-1, keepdim=not width)
    outer = generate_gparam(data.amin().reshape(1), data.amax().reshape(1)) if is_nvfp4(cast) else None
    scale, zero = calculate_qparams(least, most, args, global_scale=outer)
    return coded(divide(data, scale, zero, args, global_scale=outer), scale, outer, cast)


def coded(values, scale, outer, cast):
    """Codes and scales of numbers on the grid and their factors."""
    if is_mx(cast, MX, ["even"]):
        scales = compress_mx_scale(scale, torch.uint8).numpy()
        if cast["element"] == "e2m3":
            raise NotImplementedError
        if cast["element"] == "e4m3":
            return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scales
        return e2m1_codes(values), scales
    if is_nvfp4(cast):
        kept = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return e2m1_codes(values), kept, outer.reciprocal().numpy()
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scale.numpy()


def dequantize(codes, scales, cast):
    """Values of stored codes, as its compressors read them; NVFP4 under the tensor scale 1."""
    args, outer = scheme(cast), torch.ones(1) if is_nvfp4(cast) else None
    if is_nvfp4(cast):
        factors = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
    elif is_mx(cast, ["e2m1", "e4m3"], ["even"]):
        factors = decompress_mx_scale(torch.from_numpy(scales)).float()
    else:
        raise NotImplementedError
    if cast["element"] == "e4m3":
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    else:
        values = unpack_fp4_from_uint8(torch.from_numpy(packed(codes)), *codes.shape, dtype=torch.float32)
    return multiply(values, factors, args=args, global_scale=outer, dtype=torch.float32).numpy()

"""AMD's Quark: the values of its emulation of MX; it returns no codes here."""

import torch
from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx
from quark.torch.kernel.mx.triton import upcast_from_mxfp_torch
from shared import installed, is_mx, packed

version = installed("amd-quark")
REQUIRES = ["amd-quark==0.13", "onnx", "protobuf", "plotly", "joblib", "evaluate", "ninja"]
REQUIRES += ["onnxslim", "onnxruntime", "flatbuffers", "coloredlogs", "ml_dtypes"]
KINDS = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": "fp4"}
KINDS |= {"int8": "int8"}
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}


def emulate(x, cast):
    """Values of `fake_quantize_mx` under one of its three scale rules."""
    if not is_mx(cast, KINDS, ["floor", "even", "ceil"]):
        raise NotImplementedError
    data, rule = torch.from_numpy(x.copy()), cast["scale_rule"]
    made = fake_quantize_mx(
        data, -1, 32, scale_calculation_mode=rule, mx_element_dtype=KINDS[cast["element"]]
    )
    return made.numpy()


def dequantize(codes, scales, cast):
    """Values of stored codes, by the reference of its kernel."""
    if not is_mx(cast, FLOATS, ["floor"]):
        raise NotImplementedError
    stored = torch.from_numpy(packed(codes) if cast["element"] == "e2m1" else codes)
    stored = stored.view(FLOATS[cast["element"]])
    return upcast_from_mxfp_torch(stored, torch.from_numpy(scales), torch.float32, axis=-1).numpy()

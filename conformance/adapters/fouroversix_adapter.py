"""mit-han-lab/fouroversix against the vectors: its reference in PyTorch.

    FOUROVERSIX=CHECKOUT python -m narrowgauge.conformance conformance/adapters/fouroversix_adapter.py

Written for commit dadfad6. It has NVFP4, NVFP4 that reaches to 6 or to 4, and MXFP4. It returns the amax;
the tensor scale is what its errors are computed with.
"""

from importlib import import_module

import torch
from checkouts import folder, package
from shared import checked_out, packed

version = checked_out("FOUROVERSIX")

ROOT = folder("FOUROVERSIX", "src/fouroversix")
for name in ("", ".quantize", ".quantize.pytorch", ".kernels"):
    package(f"fouroversix{name}", ROOT.joinpath(*name.split(".")))
reference = import_module("fouroversix.quantize.pytorch.reference")
Backend = import_module("fouroversix.quantize.backend").QuantizeBackendBase
Tensor = import_module("fouroversix.quantize.quantized_tensor").QuantizedTensor
Type, Rule = reference.DataType, reference.ScaleRule

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RULES = {None: Rule.static_6, "mse": Rule.mse, "mae": Rule.mae, "max": Rule.abs_max}
READ = {"name", "element", "scale", "scale_rule", "block", "tensor_scale", "input", "candidates", "choose"}


def quantize(x, cast, **more):
    """Codes and scales as `reference.quantize` computes them."""
    scale, block, candidates = cast["scale"], cast.get("block"), cast.get("candidates")
    if set(cast) - READ or cast.get("scale_rule", "rceil") != "rceil":
        raise NotImplementedError
    match cast["element"], scale, block, cast.get("tensor_scale"):
        case "e2m1", "e8m0", [1, 32], None:
            kind = Type.mxfp4
        case "e2m1", "e4m3", [1 | 16, 16], "tensor" if candidates in (None, [6, 4]):
            kind = Type.nvfp4
        case _:
            raise NotImplementedError
    data = torch.from_numpy(x).to(DTYPES[cast["input"]])
    rows, columns = data.shape
    data = torch.nn.functional.pad(data, (0, -columns % block[1], 0, -rows % block[0]))
    codes, scales, amax = reference.quantize(
        data,
        block_scale_2d=block[0] > 1,
        fp4_format=kind,
        scale_rule=RULES[cast.get("choose")],
        use_blackwell_scale_layout=False,
        **more,
    )
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[:rows, :columns].numpy()
    scales = scales.view(torch.uint8).reshape(data.shape[0], -1)[:: block[0]].numpy()
    largest = 256.0 if kind == Type.nvfp4 and candidates else 448.0
    return codes, scales, (amax / (6.0 * largest)).numpy()


def stochastic(x, cast, seed):
    """Codes and scales under its rounding `stochastic`."""
    torch.manual_seed(seed)
    return quantize(x, cast, round_style=reference.RoundStyle.stochastic)


def dequantize(codes, scales, cast):
    """Values of stored codes, by the backend in PyTorch; under the tensor scale 1."""
    match cast["element"], cast["scale"], cast.get("block"), cast.get("tensor_scale"):
        case "e2m1", "e8m0", [1, 32], None:
            kind, scale = Type.mxfp4, torch.float8_e8m0fnu
        case "e2m1", "e4m3", [1, 16], "tensor":
            kind, scale = Type.nvfp4, torch.float8_e4m3fn
        case _:
            raise NotImplementedError
    stored = torch.from_numpy(packed(codes)), torch.from_numpy(scales).view(scale), torch.tensor(2688.0)
    tensor = Tensor(
        *(*stored, kind, codes.shape, Rule.static_6, reference.RoundStyle.nearest, codes.shape),
        scale_factors_are_in_blackwell_layout=False,
    )
    given = {"dtype": torch.float32, "intermediate_dtype": torch.float32}
    return Backend.dequantize(tensor, **given).numpy()

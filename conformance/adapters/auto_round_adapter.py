"""auto-round: the values of its data types; it returns no codes."""

from types import SimpleNamespace

import torch
from auto_round.data_type.fp8 import quant_fp8_sym
from auto_round.data_type.mxfp import quant_mx, quant_mx_rceil
from auto_round.data_type.nvfp import nv_fp4
from auto_round.experimental.qmodules.mx import MXFP4QuantLinear, MXFP8QuantLinear
from auto_round.experimental.qmodules.nvfp4 import NVFP4QuantLinear
from shared import installed, is_fp8, is_mx, is_nvfp4, packed

version = installed("auto-round")
REQUIRES = ["auto-round==0.16.1", "py-cpuinfo"]
KINDS = {
    "e4m3": "mx_fp8e4m3",
    "e5m2": "mx_fp8e5m2",
    "e3m2": "mx_fp6e3m2",
    "e2m3": "mx_fp6e2m3",
    "e2m1": "mx_fp4",
}
RULES = {"floor": quant_mx, "rceil": quant_mx_rceil}


def emulate(x, cast, **more):
    """Values after rounding to nearest, without its search."""
    data = torch.from_numpy(x.copy())
    if is_mx(cast, KINDS, RULES):
        made = RULES[cast["scale_rule"]](data, group_size=32, data_type=KINDS[cast["element"]], **more)
    elif is_nvfp4(cast):
        made = nv_fp4(data, group_size=16)
    elif is_fp8(cast, None):
        made = quant_fp8_sym(data, tensor_max=data.abs().max().reshape(1, 1), group_size=-1)
    elif is_fp8(cast, [1, 0]):
        made = quant_fp8_sym(data, group_size=-1)
    else:
        raise NotImplementedError
    return made[0].numpy()


def stochastic(x, cast, seed):
    """Values of its stochastic rounding, which its MX types have."""
    if not is_mx(cast, KINDS, RULES):
        raise NotImplementedError
    torch.manual_seed(seed)
    return emulate(x, cast, mantissa_rounding="stochastic")


def dequantize(codes, scales, cast):
    """Values of stored codes, as the layers of its checkpoints read them; NVFP4 under the tensor scale 1."""
    size = {"in_features": codes.shape[1], "out_features": codes.shape[0], "config": None}
    stored, factors = torch.from_numpy(packed(codes)), torch.from_numpy(scales)
    if is_mx(cast, ["e2m1"], ["rceil"]):
        layer = MXFP4QuantLinear(**size, weight=stored, weight_scale=factors)
    elif is_mx(cast, ["e4m3"], ["rceil"]):
        eight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        layer = MXFP8QuantLinear(**size, weight=eight, weight_scale=factors)
    elif is_nvfp4(cast):
        size["config"] = SimpleNamespace(group_size=16, act_group_size=16)
        layer = NVFP4QuantLinear(**size, weight=stored, weight_scale=factors.view(torch.float8_e4m3fn))
        layer.weight_global_scale.fill_(1)
    else:
        raise NotImplementedError
    return layer.dequant_weight_online().float().numpy()

"""auto-round: the values of its data types; it returns no codes."""

import torch
from auto_round.data_type.fp8 import quant_fp8_sym
from auto_round.data_type.mxfp import quant_mx, quant_mx_rceil
from auto_round.data_type.nvfp import nv_fp4
from shared import installed, is_fp8, is_mx, is_nvfp4

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

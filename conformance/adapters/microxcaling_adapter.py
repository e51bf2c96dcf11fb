"""microsoft/microxcaling: the values of its MX emulation in PyTorch; it returns no codes.

MICROXCALING=CHECKOUT python conformance/matrix.py microxcaling
"""

import sys

import torch
from checkouts import folder
from shared import checked_out, is_mx, is_single

sys.path.append(str(folder("MICROXCALING", "mx").parent))
from mx.elemwise_ops import _quantize_elemwise
from mx.formats import ElemFormat
from mx.mx_ops import _quantize_mx

version = checked_out("MICROXCALING")
KINDS = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": "fp4_e2m1"}
KINDS |= {"int8": "int8"}


def emulate(x, cast, rounding="even"):
    """Values, with ties to even; the library's default is ties away from zero."""
    kind = ElemFormat.from_str(KINDS[cast["element"]]) if cast["element"] in KINDS else None
    data = torch.from_numpy(x.copy())
    if is_single(cast, KINDS):
        return _quantize_elemwise(data, kind, round=rounding, saturate_normals=True).numpy()
    if not is_mx(cast, KINDS, ["floor"]):
        raise NotImplementedError
    return _quantize_mx(data, 8, kind, axes=[-1], block_size=32, round=rounding).numpy()


def stochastic(x, cast, seed):
    """Values of its rounding `dither`."""
    torch.manual_seed(seed)
    return emulate(x, cast, rounding="dither")

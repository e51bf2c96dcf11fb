"""Brevitas: the values of its MX weight quantizers and of its single floats; it returns no codes."""

import torch
from brevitas import config
from brevitas.inject.enum import FloatToIntImplType
from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight, MXInt8Weight
from shared import installed, is_mx

version = installed("brevitas")
REQUIRES = ["brevitas==0.13.4", "dependencies==2.0.1", "unfoldNd"]
config.IGNORE_MISSING_KEYS = True
BITS = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}


def emulate(x, cast, **more):
    """The quantized weight of a linear layer that holds x."""
    if not is_mx(cast, [*BITS, "int8"], ["floor"]):
        raise NotImplementedError
    kind = MXInt8Weight
    if cast["element"] != "int8":
        exponent, mantissa = BITS[cast["element"]]
        facts = {"bit_width": 1 + exponent + mantissa, "exponent_bit_width": exponent}
        kind = type("Weight", (MXFloat8e4m3Weight,), facts | {"mantissa_bit_width": mantissa} | more)
    layer = QuantLinear(x.shape[1], x.shape[0], bias=False, weight_quant=kind)
    layer.weight.data = torch.from_numpy(x.copy())
    with torch.no_grad():
        return layer.quant_weight().value.numpy()


def stochastic(x, cast, seed):
    """The weight under its stochastic rounding, whose seed is an attribute of the quantizer."""
    if cast["element"] == "int8":
        raise NotImplementedError
    return emulate(x, cast, float_to_int_impl_type=FloatToIntImplType.STOCHASTIC_ROUND, seed=seed)

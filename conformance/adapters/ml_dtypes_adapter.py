"""ml_dtypes: single values. Its OCP FP8 overflows to NaN or infinity, its narrower formats saturate."""

import ml_dtypes
import numpy as np
from shared import installed, is_single

version = installed("ml_dtypes")
REQUIRES = ["ml_dtypes==0.6.0"]
OVERFLOWS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SATURATES = {
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def quantize(x, cast):
    """The codes of values, converted one by one."""
    kinds = SATURATES if cast.get("saturates") else OVERFLOWS
    if not is_single(cast, kinds, kinds is SATURATES):
        raise NotImplementedError
    return x.astype(kinds[cast["element"]]).view(np.uint8), np.empty(0)

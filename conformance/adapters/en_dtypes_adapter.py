"""en-dtypes: single values of the narrow OCP formats. Its HiFloat8 has no vectors here."""

import en_dtypes
import numpy as np
from shared import installed, is_single

version = installed("en-dtypes")
REQUIRES = ["en-dtypes==0.0.4"]
ELEMENTS = {
    "e3m2": en_dtypes.float6_e3m2,
    "e2m3": en_dtypes.float6_e2m3,
    "e2m1": en_dtypes.float4_e2m1,
    "e8m0": en_dtypes.float8_e8m0,
}


def quantize(x, cast):
    """The codes of values, converted one by one."""
    if not is_single(cast, ELEMENTS):
        raise NotImplementedError
    return x.astype(ELEMENTS[cast["element"]]).view(np.uint8), np.empty(0)

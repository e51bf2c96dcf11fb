"""gfloat against the vectors: `python -m narrowgauge.conformance conformance/adapters/gfloat_adapter.py`.

Written for gfloat 0.5.2. It has the OCP's elements, and MX scales by the OCP's rule (`floor`).
"""

import gfloat
import numpy as np
from gfloat import formats
from shared import installed, is_mx, is_single

version = installed("gfloat")
REQUIRES = ["gfloat==0.5.2"]

ELEMENTS = {
    "e4m3": formats.format_info_ocp_e4m3,
    "e5m2": formats.format_info_ocp_e5m2,
    "e3m2": formats.format_info_ocp_e3m2,
    "e2m3": formats.format_info_ocp_e2m3,
    "e2m1": formats.format_info_ocp_e2m1,
}
SINGLE = ELEMENTS | {"e8m0": formats.format_info_ocp_e8m0}
READ = {"name", "element", "scale", "scale_rule", "block", "input"}


def quantize(x, cast):
    """Codes and scales as gfloat computes them."""
    if is_single(cast, SINGLE, cast.get("saturates")) and "saturates" in cast:
        kind = SINGLE[cast["element"]]
        rounded = gfloat.round_ndarray(kind, x.astype(np.float64), sat=cast["saturates"])
        return gfloat.encode_ndarray(kind, rounded), np.empty(0)
    is_mx = cast["scale"] == "e8m0" and cast["scale_rule"] == "floor" and cast["block"][0] == 1
    if set(cast) - READ or not is_mx or cast["element"] not in ELEMENTS:
        raise NotImplementedError
    element, width = ELEMENTS[cast["element"]], cast["block"][1]
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % width)))
    blocks = wide.reshape(len(x), -1, width)
    scales = np.apply_along_axis(lambda block: gfloat.compute_scale_amax(element.emax, block), 2, blocks)
    rounded = gfloat.round_ndarray(element, blocks / scales[..., None], sat=True)
    codes = gfloat.encode_ndarray(element, rounded).reshape(len(x), -1)
    return codes[:, : x.shape[1]], gfloat.encode_ndarray(SINGLE["e8m0"], scales)


def stochastic(x, cast, seed):
    """Values under its stochastic rounding with 24 random bits."""
    if not is_single(cast, ELEMENTS):
        raise NotImplementedError
    bits = np.random.default_rng(seed).integers(2**24, size=x.shape)
    mode = gfloat.RoundMode.Stochastic
    return gfloat.round_ndarray(ELEMENTS[cast["element"]], x.astype(np.float64), mode, True, bits, 24)


def dequantize(codes, scales, cast):
    """Values of stored codes, by `decode_block`."""
    if not is_mx(cast, ELEMENTS, ["floor"]):
        raise NotImplementedError
    facts = {"etype": ELEMENTS[cast["element"]], "k": 32, "stype": SINGLE["e8m0"]}
    kind = gfloat.BlockFormatInfo(name="mx", **facts)
    blocks = np.concatenate([scales.reshape(-1, 1), codes.reshape(-1, 32)], -1).tolist()
    return np.array([list(gfloat.decode_block(kind, block)) for block in blocks]).reshape(codes.shape)

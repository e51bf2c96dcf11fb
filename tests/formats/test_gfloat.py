"""Every rounding of every bfloat16 as in gfloat, where the formats overlap."""

import warnings

import numpy as np
import pytest
import torch

import narrowgauge as ng

with warnings.catch_warnings():  # of gfloat's own, while it is imported
    warnings.simplefilter("ignore")
    gfloat = pytest.importorskip("gfloat", reason="needs gfloat")
    from gfloat import formats as theirs

FORMATS = {
    "e4m3": theirs.format_info_ocp_e4m3,
    "e5m2": theirs.format_info_ocp_e5m2,
    "e3m2": theirs.format_info_ocp_e3m2,
    "e2m3": theirs.format_info_ocp_e2m3,
    "e2m1": theirs.format_info_ocp_e2m1,
    "int8": theirs.format_info_ocp_int8,
    "fp16": theirs.format_info_binary16,
    "bf16": theirs.format_info_bfloat16,
}
ROUNDINGS = {
    "nearest-even": gfloat.RoundMode.TiesToEven,
    "half-away": gfloat.RoundMode.TiesToAway,
    "toward-zero": gfloat.RoundMode.TowardZero,
}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_rounding_of_every_bfloat16(name, rounding):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()].double()
    with np.errstate(all="ignore"):
        expected = gfloat.round_ndarray(FORMATS[name], x.numpy(), ROUNDINGS[rounding], sat=True)
    got = ng.round_to(x, name, rounding).numpy()
    if name == "int8":  # its code -2 has no counterpart above, and ours saturates to the same on both sides
        expected = np.maximum(expected, -ng.format(name).max)
    np.testing.assert_array_equal(got, expected)

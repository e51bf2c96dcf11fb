"""The same tensor through other libraries: the same codes and scales.

torchao's `to_mx` for the MX casts under all four scale rules. Left out are blocks whose scale has the E8M0
code 0, which ours quantizes by exactly 2^-127: torchao's source does too, its releases up to 0.18 do not.
"""

import warnings

import pytest
import torch

import narrowgauge as ng

with warnings.catch_warnings():  # of torchao's own, while it is imported
    warnings.simplefilter("ignore")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

ELEMENTS = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8-e5m2": torch.float8_e5m2,
    "mxfp6-e3m2": "fp6_e3m2",
    "mxfp6-e2m3": "fp6_e2m3",
    "mxfp4": torch.float4_e2m1fn_x2,
}


def inputs():
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(256, 256, generator=g)
    wide = normal * torch.exp2(torch.randint(-60, 60, (256, 256), generator=g))
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    return {
        "bf16": normal.bfloat16(),
        "fp32": normal,
        "every bf16": torch.where(every.isfinite(), every, 0),  # blocks with others are another matter
        "tiny": normal * 2.0**-125,
        "subnormal": normal * 2.0**-140,
        "huge": normal.sign() * 3.3e38,
        "zeros": torch.zeros(32, 64),
        "wide": wide,
        "mixed": torch.cat([normal, 0 * normal, normal * 2.0**-130, wide], 1),
        "powers": torch.exp2(torch.arange(-64.0, 64.0)).reshape(4, 32) * 1.75,
    }


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_equals_torchao(name, rule):
    for kind, x in inputs().items():
        assert_same(x, name, rule, kind)


def assert_same(x, name, rule, kind):
    scale, data = mx_tensor.to_mx(x, ELEMENTS[name], 32, ScaleCalculationMode[rule.upper()])
    q = ng.quantize(x, name, scale_rule=rule)
    assert torch.equal(scale.view(torch.uint8).view(q.scale_codes.shape), q.scale_codes)
    ours = q.packed() if name == "mxfp4" else q.codes
    theirs = data.view(torch.uint8).view(ours.shape)
    counted = (q.scale_codes > 0).repeat_interleave(ours.shape[1] // q.scale_codes.shape[1], 1)
    assert torch.equal(theirs[counted], ours[counted])
    assert counted.any() or kind in ("zeros", "subnormal", "tiny")

"""What a cast determines of its operand in advance: its dtype, and whether the result is scaled."""

import pytest
import torch

from narrowgauge.quantization import cast, cast_names, emulate, make_cast
from narrowgauge.quantization.context import QuantContext
from narrowgauge.recipes import recipe, recipe_names

FREE = [
    {"element": "e2m1", "block": 16, "scale": "e5m3"},
    {"element": "e2m1", "block": 16, "scale": "bf16"},
    {"element": "e4m3", "block": 32, "scale": "bf16"},
    {"element": "int4", "block": 32, "scale": "fp32"},
    {"element": "e4m3", "block": "row", "scale": "fp32"},
    {"cast": "nvfp4", "tensor_scale": "none"},
    {"cast": "nvfp4", "tensor_scale": "row"},
    {"cast": "nvfp4", "tensor_scale": 128},
    {"cast": "nvfp4", "center": "tokens"},
    {"cast": "fp4-row", "outliers": 0.99, "compensate": True},
]
SHIPPED = {c for r in map(recipe, recipe_names()) for c in (*r.casts.values(), *r.attention.values()) if c}
CASTS = sorted({*SHIPPED, *map(make_cast, FREE), *map(cast, cast_names())}, key=repr)


@pytest.mark.parametrize("c", CASTS, ids=lambda c: c.name)
def test_its_dtype_and_its_scale(c):
    context = QuantContext(
        random=torch.Generator(), signs=torch.ones(c.hadamard.size) if c.hadamard.size else None
    )
    operand, scale = emulate(torch.randn(128, 128).bfloat16(), c, -1, torch.bfloat16, context)
    assert (operand.dtype == torch.float32) == c.has_wide_operand
    assert (scale is not None) == c.scales_result

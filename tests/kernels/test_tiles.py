"""A kernel that casts in blocks lays codes and scales out as the hardware reads them."""

from dataclasses import replace

import pytest
import torch

from kernels.common import assert_same, normal
from narrowgauge.nn import Linear
from narrowgauge.recipes import recipe


def read(given):
    """All tensors among the arguments of a product, as bytes."""
    tensors = [given["mat_a"], given["mat_b"].T, *given["scale_a"], *given["scale_b"]]
    return [t.reshape(-1).contiguous().view(torch.uint8) for t in tensors]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_layer_asks_for_the_same_products(name, device, monkeypatch):
    """Forward and backward, with tiles and without; only the matmuls are left out, which no CPU has."""
    asked = []

    def taken(mat_a, mat_b, **given):
        asked.append(read({"mat_a": mat_a, "mat_b": mat_b} | given))
        return torch.ones(mat_a.shape[0], mat_b.shape[1], device=device).bfloat16()

    monkeypatch.setattr("narrowgauge.nn.gemm.torch_scaled_mm", taken)
    x = normal(48, 64, seed=1, dtype=torch.bfloat16).to(device)
    for in_tiles in (True, False):
        if not in_tiles:
            monkeypatch.setattr("narrowgauge.nn.operands.tiled_operand", lambda *_: None)
        torch.manual_seed(0)
        layer = Linear(torch.nn.Linear(64, 96, bias=False), recipe(name), 0).to(device)
        layer.spec = replace(layer.spec, native=True)  # what a GPU of the right generation decides
        layer.set_position(1, 1, 0)
        y = layer(x.clone().requires_grad_())
        y.backward(torch.full_like(y, 0.25))
    assert len(asked) == 6
    for one, other in zip(asked[:3], asked[3:], strict=True):
        assert_same(one, other)

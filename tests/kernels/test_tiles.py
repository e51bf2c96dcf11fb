"""A kernel that casts in blocks lays codes and scales out as the hardware reads them."""

from dataclasses import replace

import pytest
import torch

from kernels.common import assert_same, normal
from narrowgauge.kernels import quantize
from narrowgauge.kernels.cast import quantize_in_tiles
from narrowgauge.kernels.dispatch import plain_operations
from narrowgauge.nn import Linear
from narrowgauge.nn.gemm import arguments, quantized_operand, tiled_operand
from narrowgauge.quantization import QuantContext, make_cast
from narrowgauge.recipes import recipe


def read(given):
    """All tensors among the arguments of a product, as bytes."""
    tensors = [given["mat_a"], given["mat_b"].T, *given["scale_a"], *given["scale_b"]]
    return [t.reshape(-1).contiguous().view(torch.uint8) for t in tensors]


def bytes_of(operand):
    return read(arguments(operand, operand))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "mxfp8"])
def test_the_hardware_reads_the_same_bytes(name, device):
    """The tiles of `arguments` from codes and scales that the cast wrote one by one; more in `test_twins`."""
    x, cast = normal(130, 40, dtype=torch.bfloat16).to(device), make_cast(name)
    ours = tiled_operand(x, cast, -1, QuantContext())
    theirs = quantized_operand(quantize(x, cast, -1)[0], -1)
    assert_same(bytes_of(ours), bytes_of(theirs))
    assert (ours.other is not None) == cast.ignores_axis
    if cast.ignores_axis:
        assert_same(bytes_of(ours.transposed()), bytes_of(theirs.transposed()))


def test_other_casts_are_laid_out_elsewhere(device):
    x = torch.randn(32, 128).to(device)
    for name in ("e4m3", "fp8-row", "fp8-1x128", "fp8-128x128", "mxfp6-e2m3"):
        assert quantize_in_tiles(x, make_cast(name)) is None
    with plain_operations():
        assert quantize_in_tiles(x, make_cast("nvfp4")) is None


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

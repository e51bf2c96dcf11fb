"""A kernel that casts in blocks lays codes and scales out as the hardware reads them."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.formats import random_stream
from narrowgauge.kernels import quantize
from narrowgauge.kernels.cast import quantize_in_tiles
from narrowgauge.kernels.dispatch import plain_operations
from narrowgauge.nn import Linear
from narrowgauge.nn.gemm import arguments, quantized_operand, tiled_operand
from narrowgauge.quantization import QuantContext, make_cast
from narrowgauge.recipes import recipe

CASTS = {
    "nvfp4": make_cast("nvfp4"),
    "nvfp4-2d": make_cast("nvfp4-2d"),
    "nvfp4 at random": make_cast({"cast": "nvfp4", "rounding": "stochastic", "hadamard": 16}),
    "mxfp4": make_cast("mxfp4"),
    "mxfp8": make_cast("mxfp8"),
}


def read(given):
    """All tensors among the arguments of a product, as bytes."""
    tensors = [given["mat_a"], given["mat_b"].T, *given["scale_a"], *given["scale_b"]]
    return [t.reshape(-1).contiguous().view(torch.uint8) for t in tensors]


def assert_same_bytes(ours, theirs):
    for a, b in zip(read(ours), read(theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.tier("thorough", keep=("(40, 72)",))
@pytest.mark.parametrize("shape", [(40, 72), (130, 200)])
@pytest.mark.parametrize("name", CASTS)
def test_the_hardware_reads_the_same_bytes(name, shape, device):
    """The tiles of `arguments` from codes and scales that the cast wrote one by one, padding included."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    if "random" not in name:  # a transform would spread it
        x[3, 5], x[20, 40] = torch.nan, torch.inf
    cast = CASTS[name]
    for axis in (-1, 0):
        context = QuantContext(random_stream(1, 2, 3, device) if "random" in name else None)
        ours = tiled_operand(x, cast, axis, context)
        theirs = quantized_operand(quantize(x, cast, axis, context)[0], axis)
        assert_same_bytes(arguments(ours, ours), arguments(theirs, theirs))
        assert (ours.other is not None) == cast.ignores_axis
        if cast.ignores_axis:
            other = theirs.transposed()
            assert_same_bytes(arguments(*[ours.transposed()] * 2), arguments(other, other))


def test_other_casts_are_laid_out_elsewhere(device):
    x = torch.randn(32, 128).to(device)
    for name in ("e4m3", "fp8-row", "fp8-1x128", "fp8-128x128", "mxfp6-e2m3"):
        assert quantize_in_tiles(x, make_cast(name)) is None
    with plain_operations():
        assert quantize_in_tiles(x, CASTS["nvfp4"]) is None


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_layer_asks_for_the_same_products(name, device, monkeypatch):
    """Forward and backward, with tiles and without; only the matmuls are left out, which no CPU has."""
    asked = []

    def taken(mat_a, mat_b, **given):
        asked.append(read({"mat_a": mat_a, "mat_b": mat_b} | given))
        return torch.ones(mat_a.shape[0], mat_b.shape[1], device=device).bfloat16()

    monkeypatch.setattr("narrowgauge.nn.gemm.torch_scaled_mm", taken)
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    for in_tiles in (True, False):
        if not in_tiles:
            monkeypatch.setattr("narrowgauge.nn.operands.tiled_operand", lambda *_: None)
        torch.manual_seed(0)
        layer = Linear(torch.nn.Linear(64, 96, bias=False), recipe(name), 0).to(device)
        layer.spec = replace(layer.spec, native=True)  # what a GPU of the right generation decides
        layer.set_position(1, 1, 0)
        y = layer(x.clone().requires_grad_())
        y.backward(torch.full_like(y, 0.25))
    ours, theirs = asked[:3], asked[3:]
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

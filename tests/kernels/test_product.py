"""Around a product: scale, rounding, codes along the other axis, signs of a transform, all bit for bit."""

import pytest
import torch

from narrowgauge.formats import RandomStream, random_stream
from narrowgauge.kernels.cast import random_signs
from narrowgauge.kernels.product import scaled_and_rounded
from narrowgauge.nn.gemm import along_contraction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0123, 3.7e-12, 5.1e9, float("nan")])
def test_it_is_the_scaled_product_rounded_once(device, dtype, scale):
    x = torch.randn(37, 131, generator=torch.Generator().manual_seed(0)) * 100
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 2.0**-140])
    x, scale = x.to(device), torch.tensor(scale, device=device)
    got = scaled_and_rounded(x, scale, dtype)
    torch.testing.assert_close(got, (x * scale).to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[~got.isnan()], (x * scale).signbit()[~got.isnan()])
    other = torch.tensor(1.7, device=device)
    both = scaled_and_rounded(x, scale, dtype, other)
    torch.testing.assert_close(both, (x * (scale * other)).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_signs_are_those_of_the_stream(device, size):
    for tensor in range(5):
        key = random_stream(3, 7, tensor, device).key
        expected = 1 - 2 * (RandomStream(key).bits((size,)) & 1)
        assert torch.equal(random_signs(key, size).float(), expected.float())


@pytest.mark.parametrize("shape", [(64, 64), (70, 131), (1, 5), (3, 1)])
def test_codes_along_the_other_axis_are_the_same_codes(device, shape):
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = along_contraction(codes.to(device).T)
    assert found.is_contiguous()
    assert torch.equal(found.cpu(), codes.T)
    strided = codes.to(device)[:, ::2]
    assert torch.equal(along_contraction(strided).cpu(), codes[:, ::2])

"""The activation kernels against plain torch: bit for bit with the same exponential, rounding for rounding.

`by_hand` writes torch's operations out with the exponential that the kernel has: numpy's in the interpreter,
torch's own on a GPU, libdevice's where compiled code is executed on the CPU.
"""

import numpy as np
import pytest
import torch

from kernels.common import DTYPES, assert_same, normal
from narrowgauge.kernels.activation import gelu, swiglu, swiglu_reference
from ptx.floats import libdevice_exp
from support.interpreted import COMPILED_FOR

BF16 = torch.bfloat16


def every_bf16():
    """All 65,536 of them: zeros, subnormals, infinities and NaN among them."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)


def exp(x):
    if COMPILED_FOR:
        with np.errstate(all="ignore"):
            return torch.from_numpy(libdevice_exp(x.numpy()))
    return x.exp() if x.is_cuda else torch.from_numpy(np.exp(x.numpy()))


def swiglu_by_hand(gate, up, dy):
    dtype, g, u, d = gate.dtype, gate.float(), up.float(), dy.float()
    silu = (g / (1 + exp(-g))).to(dtype).float()
    sigmoid = 1 / (1 + exp(-g))
    dsilu = (d * u).to(dtype).float()
    dgate = dsilu * sigmoid * (1 + g * (1 - sigmoid))
    return (silu * u).to(dtype), torch.cat([dgate.to(dtype), (d * silu).to(dtype)], -1)


def with_gradient(function, x, dy):
    x = x.clone().requires_grad_()
    y = function(x)
    (grad,) = torch.autograd.grad(y, x, dy)
    return y.detach(), grad


@pytest.mark.tier("thorough")
def test_swiglu_of_every_bf16_rounds_where_torch_rounds(device):
    gate = every_bf16().view(32, 2048).to(device)
    up, dy = (normal(32, 2048, seed=s, dtype=BF16).to(device) for s in (1, 2))
    assert_same(with_gradient(swiglu, torch.cat([gate, up], -1), dy), swiglu_by_hand(gate, up, dy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 96), (3, 1030), (70, 3), (1, 1)])
def test_swiglu_of_any_shape_is_torchs_within_the_exponential(device, dtype, shape):
    """Two exponentials differ by an ulp or two of fp32, the results by four, or by one ulp of the dtype where
    that moves them over the edge between two roundings; there are two of these."""
    *lead, F = shape
    gate_up, dy = normal(*lead, 2 * F, dtype=dtype).to(device), normal(*shape, seed=1, dtype=dtype).to(device)
    y, grad = with_gradient(swiglu, gate_up, dy)
    if device.type == "cpu":
        assert_same([y, grad], swiglu_by_hand(*gate_up.chunk(2, -1), dy))
    reference, reference_grad = with_gradient(swiglu_reference, gate_up, dy)
    rtol = 2 * torch.finfo(dtype).eps + 2**-21
    torch.testing.assert_close(y, reference, rtol=rtol, atol=1e-7)
    torch.testing.assert_close(grad, reference_grad, rtol=rtol, atol=1e-6)


def gelu_in_double(x):
    """By the sigmoid, which does not cancel; with its derivative."""
    x = x.double()
    u = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    slope = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x**2)
    s = torch.sigmoid(2 * u)
    return x * s, s + x * s * (1 - s) * 2 * slope


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gelu_of_every_bf16_is_the_nearest_but_for_ties(device, dtype):
    """In fp32 it errs by less than 2^-16: an error of 4 * 2^-24 of the angle 2u <= 88 is what the exponential
    makes of its rounding; where that overflows the result is below 1e-36."""
    x = every_bf16().to(device)
    x = x[(x.abs() < 2.0**40) & ~x.isnan()].to(dtype).requires_grad_()
    y = gelu(x)
    dy = normal(len(x), seed=1, dtype=dtype).to(device)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact, slope = gelu_in_double(x.detach())
    near = torch.finfo(dtype).eps / 2 + 2.0**-16
    assert ((y.double() - exact).abs() <= near * exact.abs() + 1e-36).all()
    exact_dx = dy.double() * slope
    # s and x s (1 - s) 2u' have opposite signs below 0, and their sum errs as each of them does.
    terms = dy.double().abs() * (slope.abs() + x.detach().double().clamp(-10, 0).abs() * exact.abs())
    assert ((dx.double() - exact_dx).abs() <= near * exact_dx.abs() + 2.0**-15 * terms + 1e-36).all()

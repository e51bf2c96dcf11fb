"""The product under a tensor scale: one rounding, and the dtype of the wider operand."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from narrowgauge.nn.gemm import ROWS, Operand, multiply, scaled_mm

M, K, N = 60, 200, 50


def operands(dtype):
    g = torch.Generator().manual_seed(0)
    return torch.randn(M, K, generator=g).to(dtype), torch.randn(K, N, generator=g).to(dtype)


def half_ulp_bf16(x):
    """Half of the spacing of bf16 numbers around each element."""
    return torch.exp2(x.abs().log2().floor() - 8)


@pytest.mark.parametrize("scale", [0.0123, 3.7e-12, 5.1e9, -1 / 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scaled_product_is_rounded_once(dtype, scale):
    a, b = operands(dtype)
    s = torch.tensor(scale)
    exact = (a.double() @ b.double()) * s.double()
    bound = (K + 3) * 2.0**-24 * (a.double().abs() @ b.double().abs()) * abs(scale)
    bound = bound + half_ulp_bf16(exact) * (dtype == torch.bfloat16)
    turned = (a.T.contiguous().T, b.T.contiguous().T, s)
    for found in (scaled_mm(a, b, s), scaled_mm(*turned)):
        assert ((found.double() - exact).abs() <= bound).all()
    if dtype == torch.bfloat16:  # the bound separates one rounding from two
        twice = ((a @ b).float() * s).bfloat16().double()
        assert ((twice - exact).abs() > bound).any()
    for poison in (float("nan"), float("inf")):
        assert not scaled_mm(a, b, torch.tensor(poison)).isfinite().any()


def test_scales_multiply_whichever_operands_have_them():
    a, b_KN = operands(torch.bfloat16)
    b, two, three = b_KN.T, torch.tensor(2.0), torch.tensor(3.0)

    def product(scale_a, scale_b):
        return multiply(Operand(a, scale_a), Operand(b, scale_b), torch.bfloat16)

    plain = product(None, None)
    assert torch.equal(plain, a @ b_KN)
    assert torch.equal(product(two, None), 2 * plain)
    assert torch.equal(product(None, two), 2 * plain)
    assert torch.equal(product(two, three), scaled_mm(a, b_KN, torch.tensor(6.0)))


@pytest.mark.parametrize("b_has_rest", [False, True])
def test_operands_in_parts_give_the_product_of_their_numbers(b_has_rest):
    a, b_KN = operands(torch.bfloat16)
    parts = [(t, torch.linspace(0.5, 2, len(t)), (t / 3).bfloat16()) for t in (a, b_KN.T)]
    x, w = (Operand(*part, form=ROWS) for part in (parts[0], parts[1] if b_has_rest else parts[1][:2]))
    exact = x.values().double() @ w.values().double().T
    bound = half_ulp_bf16(exact) + 2 * K * 2.0**-24 * (x.values().abs() @ w.values().abs().T)
    assert ((multiply(x, w, torch.bfloat16).double() - exact).abs() <= bound).all()


def test_the_wider_operand_decides_the_dtype():
    a, b = operands(torch.float32)
    narrow_a, narrow_b = a.bfloat16(), b.bfloat16()
    assert torch.equal(multiply(Operand(a), Operand(narrow_b.T), torch.bfloat16), a @ narrow_b.float())
    assert torch.equal(multiply(Operand(narrow_a), Operand(b.T), torch.bfloat16), narrow_a.float() @ b)
    assert multiply(Operand(a.half()), Operand(narrow_b.T), torch.bfloat16).dtype == torch.float32


WITHOUT_BF16 = """
import torch
from narrowgauge.kernels.dispatch import is_slow
from narrowgauge.kernels.attention import attend
from narrowgauge.nn.gemm import Operand, multiply
a, b = torch.randn(40, 64).bfloat16(), torch.randn(48, 64).bfloat16()
print(is_slow(a), is_slow(a.half()), is_slow(a.float()))
print(torch.equal(multiply(Operand(a), Operand(b), torch.bfloat16), (a.float() @ b.float().T).bfloat16()))
q, k, v = torch.randn(3, 2, 2, 16, 32).bfloat16()
print(torch.equal(attend(q, k, v), attend(q.float(), k.float(), v.float()).bfloat16()))
"""


@pytest.mark.tier("thorough")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's switch is of x86")
def test_a_cpu_without_bf16_multiplies_in_fp32():
    """oneDNN takes this CPU for one without AVX-512, as most laptops have."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", WITHOUT_BF16]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert told.split() == ["True", "True", "False", "True", "True"]

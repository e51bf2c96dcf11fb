"""The product under a tensor scale: one rounding, and the dtype of the wider operand."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from narrowgauge.nn.gemm import Operand, biased, multiply, plain_mm, scaled_mm, summed
from narrowgauge.quantization import cast_names, emulate, make_cast

M, K, N = 60, 200, 50


def operands(dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, K, generator=g).to(dtype), torch.randn(K, N, generator=g).to(dtype)


def ulp_bf16(x):
    """Spacing of bf16 numbers around each element."""
    return torch.exp2(x.abs().log2().floor() - 7)


@pytest.mark.parametrize("scale", [0.0123, 3.7e-12, 5.1e9, -1 / 3])
def test_bf16_is_rounded_once(scale):
    a, b = operands(torch.bfloat16)
    s = torch.tensor(scale)
    exact = (a.double() @ b.double()) * s.double()
    slack = K * 2.0**-24 * (a.double().abs() @ b.double().abs()) * abs(scale)
    error = (scaled_mm(a, b, s).double() - exact).abs()
    assert (error <= ulp_bf16(exact) / 2 + slack).all()
    # The bound separates one rounding from two.
    twice = ((a @ b).float() * s).bfloat16().double()
    assert ((twice - exact).abs() > ulp_bf16(exact) / 2 + slack).any()


def test_fp32_is_the_scaled_product():
    a, b = operands(torch.float32)
    exact = (a.double() @ b.double()) * 0.37
    slack = (K + 3) * 2.0**-24 * (a.double().abs() @ b.double().abs()) * 0.37
    assert ((scaled_mm(a, b, torch.tensor(0.37)).double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_leaves_nothing_finite(dtype, scale):
    assert not scaled_mm(*operands(dtype), torch.tensor(scale)).isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_operands_give_the_same_product(dtype):
    a, b = operands(dtype)
    s = torch.tensor(0.25)
    columns = scaled_mm(a.T.contiguous().T, b.T.contiguous().T, s).double()
    slack = K * 2.0**-24 * (a.double().abs() @ b.double().abs()) / 4
    rounding = ulp_bf16(columns) if dtype == torch.bfloat16 else 0
    assert ((columns - scaled_mm(a, b, s).double()).abs() <= slack + rounding).all()


def test_they_are_well_formed_operators():
    a, b = operands(torch.bfloat16)
    arguments = {
        scaled_mm: (a, b, torch.tensor(0.5)),
        plain_mm: (a, b, a.dtype),
        biased: (a, a[0]),
        summed: (a,),
    }
    for operator, given in arguments.items():
        torch.library.opcheck(operator, given)


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


def test_the_wider_operand_decides_the_dtype():
    a, b = operands(torch.float32)
    mixed = multiply(Operand(a), Operand(b.bfloat16().T), torch.bfloat16)
    assert torch.equal(mixed, a @ b.bfloat16().float())
    assert torch.equal(
        multiply(Operand(a.bfloat16()), Operand(b.T), torch.bfloat16), a.bfloat16().float() @ b
    )
    half = multiply(Operand(a.half()), Operand(b.bfloat16().T), torch.bfloat16)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("name", [n for n in cast_names() if make_cast(n).is_scaled])
def test_ones_give_twos(name):
    """MS-AMP's case: ones (4, 2) times ones (2, 3), whatever the block of the cast."""
    x, w = (Operand(*emulate(torch.ones(rows, 2), make_cast(name), -1, torch.bfloat16)) for rows in (4, 3))
    assert torch.equal(multiply(x, w, torch.bfloat16), torch.full((4, 3), 2.0).bfloat16())


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

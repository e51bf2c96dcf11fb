"""Casts whose compiled code is executed (`test_compiled`): each kind of scale, along both axes, on one input.

`test_cast` compares all inputs in the interpreter.
"""

import pytest
import torch
import triton
import triton.language as tl

from kernels.test_cast import assert_same_tensors, inputs
from narrowgauge.quantization import cast
from support.interpreted import COMPILED_FOR

NAMES = ("e4m3", "e5m2", "fp8-row", "fp8-1x128", "fp8-128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4-2d")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference_bit_for_bit(name, axis, device):
    assert_same_tensors(inputs(device)["not finite"].bfloat16(), cast(name), axis, dtypes=())
    assert_same_tensors(inputs(device)["bf16"], cast(name), axis, dtypes=(torch.bfloat16,))


@triton.jit
def narrow(x, out):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv))


def test_triton_rounds_float32_to_e4m3_once(device):
    """Before Triton 3.9 it did not for Ada: its code went by way of float16 (docs/conformance.md)."""
    x = torch.randn(2**15, generator=torch.Generator().manual_seed(0)) * 50
    x = x.clamp(-448, 448)
    out = torch.zeros_like(x, dtype=torch.float8_e4m3fn)
    narrow[(2**8,)](x, out, num_warps=4, enable_fp_fusion=False)
    others = (out.view(torch.uint8) != x.to(torch.float8_e4m3fn).view(torch.uint8)).float().mean().item()
    before = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    assert (others > 0) == (before and COMPILED_FOR == "cuda:89"), others

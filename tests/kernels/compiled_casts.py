"""Casts whose compiled code is executed (`test_compiled`): each kind of scale, along both axes, on one input.

`test_cast` compares all inputs in the interpreter.
"""

import pytest
import torch

from kernels.test_cast import assert_same_tensors, inputs
from narrowgauge.quantization import cast

NAMES = ("e4m3", "e5m2", "fp8-row", "fp8-1x128", "fp8-128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4-2d")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference_bit_for_bit(name, axis, device):
    assert_same_tensors(inputs(device)["not finite"].bfloat16(), cast(name), axis, dtypes=())
    assert_same_tensors(inputs(device)["bf16"], cast(name), axis, dtypes=(torch.bfloat16,))

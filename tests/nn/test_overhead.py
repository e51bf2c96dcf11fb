"""What a layer costs besides its arithmetic: Python calls and imports. The bounds may only go down."""

import subprocess
import sys

import pytest
import torch

from narrowgauge import convert
from narrowgauge.quantization.passes.c_call import c_library

CALLS = {"fp32": 4, "bf16": 32, "fp8": 164, "nvfp4": 182}  # of this package's functions, in one forward pass
MODULES = 92  # of this package, that `narrowgauge.nn.linear` imports


@pytest.mark.skipif(c_library() is None, reason="counted with the passes in C")
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_one_forward_pass(name):
    layer = convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), name, backend="emulated")[0]
    x, calls = torch.randn(16, 64, requires_grad=True), []
    for _ in range(3):  # what is made once is made
        layer(x).sum().backward()

    def count(frame, event, _):
        if event == "call" and "/narrowgauge/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert len(calls) <= CALLS[name]


@pytest.mark.tier("thorough")
def test_modules_that_a_layer_imports():
    code = "import sys, narrowgauge.nn.linear; print(sum(m.startswith('narrowgauge.') for m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) <= MODULES

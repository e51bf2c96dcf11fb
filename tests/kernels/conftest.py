"""Kernels are compared with their references on the GPU if there is one, else in Triton's interpreter.

Under NARROWGAUGE_COMPILED_FOR their compiled code is executed on the CPU (`ptx`).
"""

import json

import numpy as np
import pytest
import torch

from support.interpreted import COMPILED_FOR


def pytest_terminal_summary(terminalreporter):
    if COMPILED_FOR:
        from ptx.compiled import executed

        terminalreporter.write_line(f"executed {json.dumps(executed)}")


@pytest.fixture
def device(monkeypatch):
    """Where kernels run here. Triton asks for its interpreter when a kernel is defined, which is at the first
    use: on a CPU that is always under this variable. Its own functions, such as the sum, were defined when it
    was imported, by whomever. It computes with numpy, which would warn of infinities and NaN."""
    triton = pytest.importorskip("triton", reason="torch came without Triton here")
    if torch.cuda.is_available() and not COMPILED_FOR:
        yield torch.device("cuda")
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that operations on a CPU's tensors launch kernels
    if COMPILED_FOR:
        from ptx.compiled import executing

        with executing(COMPILED_FOR):
            yield torch.device("cpu")
        return
    from triton.runtime.interpreter import InterpretedFunction

    for name, function in list(vars(triton.language).items()):
        if isinstance(function, triton.JITFunction):
            monkeypatch.setattr(triton.language, name, InterpretedFunction(function.fn))
    with np.errstate(all="ignore"):
        yield torch.device("cpu")


@pytest.fixture(params=["kernel", "plain"])
def where(request, monkeypatch):
    """The device, once with kernels and once without."""
    if request.param == "kernel":
        return request.getfixturevalue("device")
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

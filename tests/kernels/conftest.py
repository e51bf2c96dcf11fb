"""Kernels are compared with their references on the GPU if there is one, else in Triton's interpreter.

Under NARROWGAUGE_COMPILED_FOR their compiled code is executed on the CPU (`ptx`).
"""

import json

import pytest
import torch

from support.interpreted import COMPILED_FOR, device  # noqa: F401  a fixture


def pytest_terminal_summary(terminalreporter):
    if COMPILED_FOR:
        from ptx.compiled import executed

        terminalreporter.write_line(f"executed {json.dumps(executed)}")


@pytest.fixture(params=["kernel", "plain"])
def where(request, monkeypatch):
    """The device, once with kernels and once without."""
    if request.param == "kernel":
        return request.getfixturevalue("device")
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

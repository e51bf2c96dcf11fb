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


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is full of NaN, so that what no kernel writes is seen."""

    def poison(made):
        return made.fill_(torch.nan) if made.is_floating_point() else made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, make=make, **k: poison(make(*a, **k)))

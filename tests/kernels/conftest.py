"""Kernels are compared with their references on the GPU if there is one, else in Triton's interpreter."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="torch came without Triton here")


@pytest.fixture
def device(monkeypatch):
    """Where kernels run here. Triton asks for its interpreter when a kernel is defined, which is at the first
    use: on a CPU that is always under this variable. Its own functions, such as the sum, were defined when it
    was imported, by whomever. It computes with numpy, which would warn of infinities and NaN."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, function in list(vars(triton.language).items()):
        if isinstance(function, triton.JITFunction):
            monkeypatch.setattr(triton.language, name, InterpretedFunction(function.fn))
    with np.errstate(all="ignore"):
        yield torch.device("cpu")

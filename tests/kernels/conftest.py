"""Kernels are compared with their references on the GPU if there is one, else in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="torch came without Triton here")


@pytest.fixture
def device(monkeypatch):
    """Where kernels run here. Triton asks for its interpreter when a kernel is defined, which is at the first
    use: on a CPU that is always under this variable."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")

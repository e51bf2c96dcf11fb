"""`make gpu`: a case that breaks or blocks the device costs itself alone.

A kernel that reads a wrong address breaks its process permanently: torch can use the GPU again only from a
new process. So the process ends after a device error, or after the seconds that a module allows a case, and
xdist starts another. Without a GPU, kernels run in Triton's interpreter, and what takes a GPU is skipped.
"""

import faulthandler
import os

import pytest
import torch

from support.interpreted import device  # noqa: F401  a fixture

MOST_S = 300  # of a case; `MOST_S` of its module instead


@pytest.fixture(autouse=True)
def _alone(request, record_property):
    """End the process where a later case could not trust it; note what to do if this case fails."""
    record_property("advice", request.module.ADVICE)
    faulthandler.dump_traceback_later(getattr(request.module, "MOST_S", MOST_S), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


@pytest.fixture
def gpu():
    """The GPU that a case takes."""
    if not torch.cuda.is_available():
        pytest.skip("it takes a GPU")
    return torch.device("cuda")

"""Every kernel is its twin in plain torch: the table of operations, on the GPU or in Triton's interpreter.

At a small shape the twin runs on the CPU, whose digits the other tests prove; at real shapes, which take a
GPU, on the device itself. tests/kernels/test_twins.py has strange numbers and odd shapes.
"""

from dataclasses import replace

import pytest
import torch

from gpu.table import OPERATIONS
from support.interpreted import plain_operations

ADVICE = (
    "start runs under NARROWGAUGE_KERNELS=0, so that plain operations compute this; attention is torch's: "
    "try another version of torch, or --training.deterministic true, which selects another kernel"
)


def require_twin(operation, device):
    """Compare at the small shape and, on a GPU, at each real one."""
    for shape in (operation.small, *(operation.real if device.type == "cuda" else ())):
        got = operation.run(device, shape)
        with plain_operations():
            there = torch.device("cpu") if shape == operation.small else device
            operation.compare(got, operation.reference(there, shape))


@pytest.mark.tier(
    "thorough", keep=("nvfp4 along axis 0", "random signs", "AdamW on msamp-o2's state", "attention")
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_is_its_twin(name, device):
    require_twin(OPERATIONS[name], device)


@pytest.mark.parametrize("name", ["SwiGLU", "GELU", "attention"])
def test_a_wrong_number_is_seen(name, device):
    """One number of the result is off by half where kernels run."""

    def wrong(device, shape):
        found = dict(OPERATIONS[name].run(device, shape))
        key, y = next((key, y.clone()) for key, y in found.items() if y is not None)
        y.view(-1)[y.abs().argmax()] *= 1.5
        return found | {key: y}

    with pytest.raises(AssertionError):
        require_twin(replace(OPERATIONS[name], run=wrong), device)

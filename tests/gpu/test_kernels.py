"""Every kernel is its twin in plain torch: the table of operations, on the GPU or in Triton's interpreter.

At a small shape the twin runs on the CPU, whose digits the other tests prove; at real shapes, which take a
GPU, on the device itself. tests/kernels/test_twins.py has strange numbers and odd shapes.
"""

import pytest
import torch

from gpu.table import OPERATIONS
from narrowgauge.kernels.dispatch import plain_operations

ADVICE = (
    "start runs under NARROWGAUGE_KERNELS=0, so that plain operations compute this; attention is torch's: "
    "try another version of torch, or --training.deterministic true, which selects another kernel"
)


@pytest.mark.tier(
    "thorough", keep=("nvfp4 along axis 0", "random signs", "AdamW on msamp-o2's state", "attention")
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_is_its_twin(name, device):
    operation = OPERATIONS[name]
    for shape in (operation.small, *(operation.real if device.type == "cuda" else ())):
        got = operation.run(device, shape)
        with plain_operations():
            there = torch.device("cpu") if shape == operation.small else device
            operation.compare(got, operation.reference(there, shape))

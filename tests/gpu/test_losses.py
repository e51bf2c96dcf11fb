"""Short trainings under each kind of recipe, against the CPU's plain path.

A small model memorizes a few sequences, using every part of a training step: kernels, native GEMMs,
low-precision state and the update. The two sequences of losses are close but not equal, because sums are
ordered differently and the difference grows with each step; so there are few steps. Over three steps with
interpreted kernels the largest difference was 0.0002.
"""

import pytest
import torch

from gpu import steps
from narrowgauge.kernels.dispatch import plain_operations
from narrowgauge.nn.self_test import verified_backend

ADVICE = (
    "train with --backend emulated, under NARROWGAUGE_KERNELS=0, or both: whichever agrees; if none does, "
    "use another recipe"
)
KINDS = (
    *("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "mxfp6-e2m3", "mxfp4"),
    *("nvfp4", "fp4", "quartet", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr", "coat", "eco"),
)
ALLOWED = 0.01


def losses(name, backend, device, is_tiny):
    """The loss of each step."""
    found = steps.trained(steps.config_of(name, is_tiny, backend), device)[1]
    return torch.tensor(found, dtype=torch.float64)[:, 0]


@pytest.mark.tier("thorough", nightly=("bf16", "fp8", "nvfp4", "msamp-o2"))
@pytest.mark.parametrize("name", KINDS)
def test_losses_agree(name, device, record_property):
    is_tiny = device.type == "cpu"
    with plain_operations():
        expected = losses(name, "emulated", torch.device("cpu"), is_tiny)
    off = float(((losses(name, "auto", device, is_tiny) - expected).abs() / expected).max())
    backend = verified_backend(steps.config_of(name, is_tiny).spec.recipe, device).name
    record_property("found", f"{backend}: off by at most {off:.1g} of the loss, {ALLOWED:g} is allowed")
    assert off <= ALLOWED

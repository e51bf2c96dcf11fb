"""Short trainings under each kind of recipe, against the CPU's plain path.

A small model memorizes a few sequences, using every part of a training step: kernels, native GEMMs,
low-precision state and the update. The two sequences of losses are close but not equal, because sums are
ordered differently and the difference grows with each step; so there are few steps. Over three steps with
interpreted kernels the largest difference was 0.0002. If losses differ by more than `ALLOWED`, the same
training is repeated without kernels, then emulated, and the failure names the setting that agrees.
"""

import os
from contextlib import nullcontext

import pytest
import torch

from gpu import steps
from narrowgauge.nn.self_test import verified_backend
from support.interpreted import plain_operations

ADVICE = "train with what the failure says agrees; if nothing does, use another recipe"
KINDS = (
    *("fp32", "bf16", "fp16", "fp8", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "mxfp6-e2m3", "mxfp4"),
    *("nvfp4", "fp4", "quartet", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr", "coat", "eco"),
)
ALLOWED = 0.01
REMEDIES = {
    "--backend emulated": ("emulated", False),
    "NARROWGAUGE_KERNELS=0": ("auto", True),
    "NARROWGAUGE_KERNELS=0 with --backend emulated": ("emulated", True),
}


def losses(name, backend, device, is_tiny, is_plain):
    """The loss of each step."""
    with plain_operations() if is_plain else nullcontext():
        found = steps.trained(steps.config_of(name, is_tiny, backend), device)[1]
    return torch.tensor(found, dtype=torch.float64)[:, 0]


def require_agreement(name, device):
    """Compare the losses of each step; returns the outcome as a clause."""
    is_tiny = device.type == "cpu"
    expected = losses(name, "emulated", torch.device("cpu"), is_tiny, True)

    def distance(*way):
        """The largest difference, as a share; infinite or NaN if a loss is."""
        return float(((losses(name, way[0], device, is_tiny, way[1]) - expected).abs() / expected).max())

    spec = steps.config_of(name, is_tiny).spec
    backend = verified_backend(spec.recipe, device).name
    off = distance("auto", False)
    if not off <= ALLOWED:
        ways = (words for words, way in REMEDIES.items() if distance(*way) <= ALLOWED)
        best = next(ways, None)
        remedy = f"with {best} it agrees" if best else "it also differs without kernels and emulated"
        pytest.fail(f"{backend}: the loss is off by {off:.2g}, {ALLOWED:g} is allowed; {remedy}")
    return f"{backend}: off by at most {off:.1g} of the loss, {ALLOWED:g} is allowed"


@pytest.mark.tier("thorough", nightly=("bf16", "fp8", "nvfp4", "msamp-o2"))
@pytest.mark.parametrize("name", KINDS)
def test_losses_agree(name, device, record_property):
    record_property("found", require_agreement(name, device))


def test_another_loss_is_seen_and_the_way_that_agrees_is_named(monkeypatch):
    right, cpu = steps.trained, torch.device("cpu")

    def with_a_fault(config, device):
        is_faulty = os.environ.get("NARROWGAUGE_KERNELS") != "0"  # as a wrong kernel
        return None, [(loss * (1.05 if is_faulty else 1.0), 0) for loss, _ in right(config, device)[1]]

    monkeypatch.setattr(steps, "trained", with_a_fault)
    with pytest.raises(pytest.fail.Exception) as error:
        require_agreement("bf16", cpu)
    assert str(error.value) == (
        "native: the loss is off by 0.05, 0.01 is allowed; with NARROWGAUGE_KERNELS=0 it agrees"
    )

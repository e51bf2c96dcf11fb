"""The same passes twice under `training.deterministic`, bit for bit.

On a GPU, the backward pass of attention adds its parts in the order in which thread blocks finish, unless
torch uses a deterministic kernel. Replays (`guard.replay_every`) and bitwise resumption need determinism.
"""

import pytest

from gpu import operations
from gpu.compare import same
from gpu.steps import config_of, strictly, weights_and_losses

ADVICE = "do not set guard.replay_every, and expect a resumed run to differ in the last bits"
SMALL, REAL = (2, 4, 40, 16), ((2, 12, 1024, 128), (4, 16, 2048, 64))


def test_attention_repeats(device):
    for shape in (SMALL, *(REAL if device.type == "cuda" else ())):
        with strictly(device):
            same(operations.attention(device, shape), operations.attention(device, shape))


@pytest.mark.tier("nightly")  # tests/training/step/test_deterministic.py repeats steps on a CPU
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_steps_repeat(recipe, device):
    config = config_of(recipe, device.type == "cpu")
    with strictly(device):
        same(weights_and_losses(config, device), weights_and_losses(config, device))

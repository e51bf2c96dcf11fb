"""The same passes twice under `training.deterministic`, bit for bit.

On a GPU, the backward pass of attention adds its parts in the order in which thread blocks finish, unless
torch uses a deterministic kernel. Replays (`guard.replay_every`) and bitwise resumption need determinism.
"""

import pytest
import torch

from gpu import operations
from gpu.compare import same
from gpu.steps import config_of, strictly, weights_and_losses

ADVICE = "do not set guard.replay_every, and expect a resumed run to differ in the last bits"
SMALL, REAL = (2, 4, 40, 16), ((2, 12, 1024, 128), (4, 16, 2048, 64))


def require_repetition(device):
    """Compute attention twice, forward and backward."""
    for shape in (SMALL, *(REAL if device.type == "cuda" else ())):
        with strictly(device):
            same(operations.attention(device, shape), operations.attention(device, shape))


def test_attention_repeats(device):
    require_repetition(device)


@pytest.mark.tier("nightly")  # tests/training/step/test_deterministic.py repeats steps on a CPU
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_steps_repeat(recipe, device):
    config = config_of(recipe, device.type == "cpu")
    with strictly(device):
        same(weights_and_losses(config, device), weights_and_losses(config, device))


def test_a_backward_pass_that_does_not_repeat_is_seen(monkeypatch):
    """A GPU whose attention adds its parts in any order: the second time a bit differs."""
    right, calls = operations.attend, []

    def attend(q, k, v):
        calls.append(q)
        q.register_hook(lambda g: g * (1 + 2**-7 * (len(calls) - 1)))
        return right(q, k, v)

    monkeypatch.setattr(operations, "attend", attend)
    with pytest.raises(AssertionError, match="values of the gradient of q are wrong"):
        require_repetition(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()

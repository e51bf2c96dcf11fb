"""A step needs float32 memory for one parameter at a time, and an encoding for two tensors."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.trainer.simulate.recorder import Recorder

SIZE = 64  # of square matrices, large enough for narrow moments


def peak(act):
    """The most bytes that are alive at once, of those that a call allocates."""
    recorder = Recorder("cpu")
    with recorder:
        act()
    return recorder.live.peak


@pytest.mark.parametrize("name", ["msamp-o1", "msamp-o2", "msamp-o3", "coat", "eco"])
def test_a_step_over_many_weights_needs_the_memory_of_one(name, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")

    def peak_of_a_step(layers):
        model = torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers)])
        model = ng.convert(model, name, keep=[])
        optimizer = ng.AdamW(model.parameters(), name)
        model(torch.ones(16, SIZE)).sum().backward()
        return peak(optimizer.step)

    assert peak_of_a_step(4) <= peak_of_a_step(1) + SIZE * SIZE

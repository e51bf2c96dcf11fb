"""Where kernels run, and where plain operations do."""

import pytest
import torch

from narrowgauge.kernels import has_kernels
from narrowgauge.kernels.dispatch import use_kernels


def test_a_cpu_has_kernels_in_the_interpreter_only(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not has_kernels(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert has_kernels(cpu)
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    assert not has_kernels(cpu)


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_before_ampere_keep_to_plain_operations(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernels(torch.device("cuda", 40 + capability[0])) is has


def test_nothing_is_launched_for_no_numbers_or_wide_ones(device):
    assert use_kernels(torch.zeros(3, device=device))
    assert not use_kernels(torch.zeros(0, device=device))
    assert not use_kernels(torch.zeros(3, dtype=torch.float64, device=device))

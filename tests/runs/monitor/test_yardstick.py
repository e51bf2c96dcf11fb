"""The yardstick of MFU: measured until it repeats, kept for every run of the machine, or left out."""

import json

import pytest
import torch

from narrowgauge.trainer.runs.monitor import yardstick as module
from narrowgauge.trainer.runs.monitor.yardstick import Yardstick, measure, yardstick

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_measured_once_and_the_same_for_every_recipe(cache):
    first = yardstick(CPU, torch.float32)
    assert 1e9 < first.flops < 1e15
    assert f"{first.flops / 1e12:.3g} TFLOP/s, the fastest " in first.source
    assert "matmul (CPU, 1 thread; measured 20" in first.source
    (entry,) = cache.rglob("*.json")
    assert yardstick(CPU, torch.bfloat16) == first == Yardstick(**json.loads(entry.read_text()))
    entry.write_text("{")
    assert yardstick(CPU, torch.float32).flops > 0


def test_a_machine_has_the_peak_of_its_faster_dtype_if_it_can_be_repeated(cache, monkeypatch):
    """A busy machine: the third fastest try takes twice as long as the fastest."""
    seconds = {torch.float32: 0.02, torch.bfloat16: 0.01}
    monkeypatch.setattr(module, "fastest_tries", lambda n, device, dtype: [seconds[dtype]] * 3)
    faster = measure(CPU, torch.float32)
    assert "bfloat16" in faster.source
    monkeypatch.setattr(module, "fastest_tries", lambda *_: [0.01, 0.012, 0.02])
    found = yardstick(CPU, torch.float32)
    assert found.flops is None
    assert "the device is busy" in found.source
    assert not list(cache.rglob("*.json")), "and is tried again by the next run"

"""Where kernels run, and where plain operations do."""

import re
from pathlib import Path

import pytest
import torch

from narrowgauge import kernels
from narrowgauge.kernels import dispatch, has_kernels
from narrowgauge.kernels.dispatch import converts_to_fp8, use_kernels
from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine


def test_a_cpu_has_kernels_in_the_interpreter_only(monkeypatch):
    for variables, has in (
        ({}, False),
        ({"TRITON_INTERPRET": "1"}, True),
        ({"NARROWGAUGE_KERNELS": "0"}, False),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert has_kernels(torch.device("cpu")) is has


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_before_ampere_keep_to_plain_operations(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernels(torch.device("cuda", 40 + capability[0])) is has


@pytest.mark.parametrize(
    ("gpu", "converts"),
    [("rtx4090", False), ("h100", True), ("b200", True), ("sm_120", True), ("mi300x", False)],
)
def test_triton_rounds_to_fp8_directly_from_hopper_on(gpu, converts):
    """For Ada it goes by way of float16, toward zero: 1.0625 + 2^-13 would become 1 in place of 1.125."""
    with imagine(named_device(gpu), lambda _: None):
        assert converts_to_fp8(torch.device("meta")) == converts


def test_nothing_is_launched_for_no_numbers_or_wide_ones(device):
    assert use_kernels(torch.zeros(3, device=device))
    assert not use_kernels(torch.zeros(0, device=device))
    assert not use_kernels(torch.zeros(3, dtype=torch.float64, device=device))


def test_every_launch_is_by_one_door_and_every_atomic_is_relaxed():
    """Triton launches on the current device, and a model may be on another; one door sees to that. A
    result is read by a later launch; an ordered atomic would flush the caches of an MI300X each time."""
    text = "".join(path.read_text() for path in (Path(kernels.__file__).parent / "triton").glob("*.py"))
    assert re.findall(r"(.*)\n.*\w\]\(", text) == ["        with torch.cuda.device_of(args[0]):"]
    assert text.count("tl.atomic_") == text.count('sem="relaxed"')


def test_missing_headers_are_found_before_a_kernel_is_built(monkeypatch, tmp_path):
    """As on Debian without python3-dev. Triton would fail in the middle of step 0; now plain operations
    run, and a sentence explains why. Headers elsewhere are found where the compiler finds them."""
    for cached in ("build_gap", "can_compile"):
        monkeypatch.setattr(dispatch, cached, getattr(dispatch, cached).__wrapped__)
    gpu = torch.device("cuda", 48)
    monkeypatch.setattr(dispatch.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv("CPATH", raising=False)
    monkeypatch.delenv("C_INCLUDE_PATH", raising=False)
    assert not has_kernels(gpu)
    lacks = "no kernels: this machine lacks Python.h (install python3-dev"
    assert dispatch.kernels_missing(gpu).startswith(lacks)
    assert dispatch.kernels_missing(torch.device("cpu")) == ""
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert dispatch.build_gap() == ""
    monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
    assert dispatch.kernels_missing(gpu) == ""

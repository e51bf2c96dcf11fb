"""Where kernels run, and where plain operations do."""

import ast
from pathlib import Path

import pytest
import torch

from narrowgauge import kernels
from narrowgauge.kernels import has_kernels
from narrowgauge.kernels.dispatch import fastest_first, use_kernels


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


def test_deterministic_attention_leaves_out_what_adds_in_any_order():
    cuda = torch.backends.cuda
    torch.use_deterministic_algorithms(True)
    try:
        with fastest_first(torch.device("cuda", 0)):
            assert cuda.flash_sdp_enabled()
            assert cuda.math_sdp_enabled()
            assert not cuda.cudnn_sdp_enabled()
            assert not cuda.mem_efficient_sdp_enabled()
        with fastest_first(torch.device("cpu")):
            assert cuda.mem_efficient_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def names_called(function):
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def launches(function):
    """Whether `kernel[grid](...)` stands in a function."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Subscript) for call in calls)


def test_every_launch_is_on_the_device_of_its_tensors():
    """Triton launches on the current device, and a model may be on another."""
    doors = 0
    for path in (Path(kernels.__file__).parent / "triton").glob("*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        launching = {function.name for function in functions if launches(function)}
        for _ in functions:  # and what calls them, from caller to caller
            launching |= {function.name for function in functions if names_called(function) & launching}
        for function in functions:
            if function.name in launching and not function.name.startswith("_"):
                doors += 1
                decorators = {getattr(decorator, "id", "") for decorator in function.decorator_list}
                assert "on_its_device" in decorators, function.name
    assert doors == 12

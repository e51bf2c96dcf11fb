"""`training.deterministic` on a GPU that is not here: strict, with no operation that torch then refuses."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.quantization.transforms import ranked
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.monitor import machine

# What raises under `torch.use_deterministic_algorithms(True)` on a GPU: of its documentation what a
# transformer could use, and kthvalue (ATen/native/cuda/Sorting.cpp).
REFUSED = {"kthvalue", "histc", "put_", "put", "cumsum", "nll_loss2d_forward", "median.dim"}


@pytest.fixture
def flags(monkeypatch):
    """The flags as they were, after the test; a GPU can be set that is not here."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def test_it_is_strict_and_refuses_a_workspace_with_which_cublas_does_not_repeat(flags, monkeypatch):
    """Where torch may only warn, flash-attention's backward pass does not repeat (attention_backward.cu)."""
    machine.use_device(torch.device("cuda", 0), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match="is ':0:0', with which cuBLAS does not repeat every bit"):
        machine.use_device(torch.device("cuda", 0), deterministic=True)


class Refusing(TorchDispatchMode):
    """Refuses what a GPU's torch refuses in strict mode."""

    def __init__(self):
        super().__init__()
        self.met = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = {func.overloadpacket.__name__, str(func).removeprefix("aten.")} & REFUSED
        if names and args[0].is_floating_point():
            self.met |= names
            if torch.get_deterministic_debug_mode():
                raise RuntimeError(f"{func} has no deterministic implementation")
        return func(*args, **(kwargs or {}))


@pytest.mark.tier("nightly", keep=("fp4",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", ["fp4", "nvfp4", "msamp-o2"])
def test_a_step_asks_for_nothing_that_is_refused(recipe, train, flags):
    """Two steps with gauges, on a CPU in torch's strict mode."""
    torch.use_deterministic_algorithms(True)
    with Refusing() as refusing:
        train(changes={"recipe.name": recipe, "training.steps": 2, "gauges.every": 1})
        ranked(torch.arange(9.0), 3)  # the clamp of FP4 outside bf16
    assert {"histc", "kthvalue"} <= refusing.met


@pytest.mark.parametrize("own", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", ""])
def test_segments_of_a_gpus_memory_may_grow_unless_the_user_has_chosen_otherwise(own, flags, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:512")
        if name != own:
            monkeypatch.delenv(name)
    machine.use_device(torch.device("cuda", 0))
    assert (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True") == (own == "")

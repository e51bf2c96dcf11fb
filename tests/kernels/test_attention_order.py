"""Which of torch's attentions are allowed where; the choice changes who computes, never what."""

import pytest
import torch

from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.dispatch import attention_backends

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def strict():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def allowed():
    """The backends of torch's attention that are enabled now."""
    cuda = torch.backends.cuda
    asked = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return {name for name, is_enabled in asked.items() if is_enabled()}


def test_torch_keeps_its_order_and_its_users_their_switch(monkeypatch):
    """Nothing is put first: torch knows which versions of cuDNN are sound, and reads the environment."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for device in (GPU, torch.device("cuda", 31)):
        order = torch._C._get_sdp_priority_order()
        with attention_backends(device, has_mask=False):
            assert allowed() == {"cudnn", "flash", "efficient", "math"}
            assert torch._C._get_sdp_priority_order() == order


def test_a_mask_is_kept_from_cudnn():
    with attention_backends(GPU, has_mask=True):
        assert allowed() == {"flash", "efficient", "math"}
    with attention_backends(CPU, has_mask=True):
        assert "cudnn" in allowed()


def test_strict_determinism_leaves_out_what_adds_in_any_order(strict):
    """The efficient one repeats in strict mode, and takes a mask, for which flash-attention has no place."""
    with attention_backends(GPU, has_mask=False):
        assert allowed() == {"flash", "efficient", "math"}


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_any_order_gives_the_attention(kv_heads, monkeypatch):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 24, 16, generator=g)
    k, v = torch.randn(2, 2, kv_heads, 24, 16, generator=g)
    plain = attend(q, k, v)
    asked = []
    monkeypatch.setattr(
        "narrowgauge.kernels.attention.attention.attention_backends",
        lambda device, has_mask: asked.append(device) or attention_backends(GPU, has_mask=True),
    )
    assert torch.equal(attend(q, k, v), plain)
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(q, k, v), plain)
    assert asked

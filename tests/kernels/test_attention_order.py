"""The order in which torch's attentions are asked changes who computes, never what is asked for."""

import pytest
import torch

from narrowgauge.kernels import dispatch
from narrowgauge.kernels.attention import attend


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_any_order_gives_the_attention(kv_heads, monkeypatch):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 24, 16, generator=g)
    k, v = torch.randn(2, 2, kv_heads, 24, 16, generator=g)
    plain = attend(q, k, v)
    asked = []
    monkeypatch.setattr(
        "narrowgauge.kernels.attention.fastest_first",
        lambda device: asked.append(device) or dispatch.sdpa_kernel(dispatch.CUDNN_FIRST, set_priority=True),
    )
    assert torch.equal(attend(q, k, v), plain)
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(q, k, v), plain)
    assert asked


def test_only_hopper_asks_cudnn_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper = dispatch.fastest_first(torch.device("cuda", 31))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    ada = dispatch.fastest_first(torch.device("cuda", 32))
    assert type(hopper) is not type(ada)
    assert type(dispatch.fastest_first(torch.device("cpu"))) is type(ada)

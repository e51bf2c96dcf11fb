"""Rotary positions in one pass equal plain torch, bit for bit; their gradient is the turn back."""

import pytest
import torch

from narrowgauge.kernels.heads import rotary
from narrowgauge.kernels.heads import rotary_reference as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table_of(T, half, *batch):
    angle = torch.rand(*batch, T, half, generator=torch.Generator().manual_seed(1)) * 1000
    return torch.stack([angle.cos(), angle.sin()])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K", "H"), [(3, 1, 6), (4, 2, 64), (1, 1, 2)])
@pytest.mark.parametrize("documents", [False, True])
def test_it_is_torchs_bit_for_bit_where_the_heads_lie(device, dtype, N, K, H, documents):
    """Heads as `Block` cuts them out of the qkv product, the table as generation cuts it."""
    B, T = 2, 5
    heads_BTNH = normal(B, T, N + 2 * K, H, dtype=dtype).to(device)
    table = table_of(T + 3, H // 2).to(device)[:, 3:]
    if documents:
        table = table_of(T, H // 2, B, 1).to(device)
    for heads in heads_BTNH.split((N, K, K), dim=2):
        x_BNTH = heads.transpose(1, 2)
        assert torch.equal(rotary(x_BNTH, table), reference(x_BNTH, table))
    x_BNTH = heads_BTNH.transpose(1, 2).contiguous()
    assert torch.equal(rotary(x_BNTH, table), reference(x_BNTH, table))


def test_what_is_written_lies_token_by_token_as_what_is_read(device):
    x_BNTH = normal(2, 5, 7, 8).to(device)[:, :, :3].transpose(1, 2)
    assert rotary(x_BNTH, table_of(5, 4).to(device)).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_turned_back_and_rounded_once(device, dtype):
    """Two fp32 multiplications and a sum, each off by half an ulp of its operands: 2^-22 is enough."""
    heads_BTNH = normal(2, 9, 5, 10, dtype=dtype).to(device).requires_grad_()
    table = table_of(9, 5, 2, 1).to(device)
    grad_BNTH = normal(2, 3, 9, 10, seed=2, dtype=dtype).to(device)
    turned = rotary(heads_BTNH[:, :, 1:4].transpose(1, 2), table)
    (got,) = torch.autograd.grad(turned, heads_BTNH, grad_BNTH)
    wide = heads_BTNH.detach().double().requires_grad_()
    turned = reference(wide[:, :, 1:4].transpose(1, 2), table.double())
    (exact,) = torch.autograd.grad(turned, wide, grad_BNTH.double())
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-22 * grad_BNTH.double().abs().max()
    assert ((got.double() - exact).abs() <= bound).all()
    assert not got[:, :, [0, 4]].any()


def test_bad_numbers_stay_in_their_pair(device):
    x_BNTH = normal(1, 2, 3, 4).to(device)
    x_BNTH[0, 0, 0, 1], x_BNTH[0, 1, 2, 2] = torch.nan, torch.inf
    x_BNTH[0, 0, 1, 0], x_BNTH[0, 0, 1, 1] = 2.0**-140, -0.0
    table = table_of(3, 2).to(device)
    turned = rotary(x_BNTH, table)
    torch.testing.assert_close(turned, reference(x_BNTH, table), rtol=0, atol=0, equal_nan=True)
    assert turned.isfinite().sum() == turned.numel() - 4


def test_every_element_is_written(device, monkeypatch):
    from narrowgauge.kernels.triton.heads import launch_rotary

    make = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: make(x).fill_(torch.nan))
    x_BNTH = normal(2, 5, 7, 6).to(device)[:, :, :3].transpose(1, 2)
    assert launch_rotary(x_BNTH, table_of(5, 3).to(device), is_back=False).isfinite().all()

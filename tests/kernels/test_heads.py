"""Heads of attention in one pass: Triton's kernels and C against plain torch, bit for bit.

The kernels round a gradient once, torch its products as well; so theirs is compared with float64.
"""

import pytest
import torch

from kernels.common import DTYPES, assert_c_is_torch, assert_same, needs_c, normal
from narrowgauge.kernels.heads import reference, rotary, rotary_reference, split_heads

SIZES = [(3, 1, 6), (4, 2, 64), (2, 2, 2)]  # N, K, H
POSITIONS = ["none", "rows", "documents"]
# Each position with each dtype and each size.
CASES = [(POSITIONS[i], *SIZES[(i + j) % 3], DTYPES[j]) for i in range(3) for j in range(3)]


def table_of(T, half, *batch):
    angle = torch.rand(*batch, T, half, generator=torch.Generator().manual_seed(1)) * 1000
    return torch.stack([angle.cos(), angle.sin()])


def given(device, N, K, H, dtype, positions, T=37):
    """The product, its bias, and the table as generation cuts it, or of documents."""
    qkv_BTC = normal(2, T, (N + 2 * K) * H, dtype=dtype).to(device).requires_grad_()
    bias_C = normal((N + 2 * K) * H, seed=1).to(device).requires_grad_()
    tables = {"none": None, "rows": table_of(T + 3, H // 2)[:, 3:], "documents": table_of(T, H // 2, 2, 1)}
    table = tables[positions]
    return qkv_BTC, bias_C, None if table is None else table.to(device)


@pytest.mark.parametrize(("positions", "N", "K", "H", "dtype"), CASES)
def test_heads_are_torchs_bit_for_bit(device, positions, N, K, H, dtype):
    """Split, with a bias and without; and turned where they lie in the product, or next to each other."""
    qkv_BTC, bias_C, table = given(device, N, K, H, dtype, positions)
    for bias in (bias_C, None):
        arguments = qkv_BTC, bias, table, (N, K, K), H
        assert_same(split_heads(*arguments), reference(*arguments))
    q_BNTH = qkv_BTC.detach().unflatten(-1, (-1, H))[:, :, :N].transpose(1, 2)
    if table is not None:
        assert_same(
            [rotary(x, table) for x in (q_BNTH, q_BNTH.contiguous())], 2 * [rotary_reference(q_BNTH, table)]
        )


def assert_rounded_once(got, exact, largest):
    """Two fp32 multiplications and a sum, each off by half an ulp of its operands: 2^-22 is enough."""
    bound = torch.finfo(got.dtype).eps / 2 * exact.abs() + 2.0**-22 * largest
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_heads_gradients_are_turned_back_and_rounded_once(device, dtype, positions):
    """The gradient of the bias: the sum of what was rounded."""
    N, K, H = 4, 2, 10
    qkv_BTC, bias_C, table = given(device, N, K, H, dtype, positions)
    heads = split_heads(qkv_BTC, bias_C, table, (N, K, K), H)
    # As attention returns them: one token by token, the others head by head.
    grads = [normal(*h.shape, seed=5 + i, dtype=dtype).to(device) for i, h in enumerate(heads)]
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    got, dbias_C = torch.autograd.grad(heads, (qkv_BTC, bias_C), grads)
    wide, wide_table = qkv_BTC.detach().double().requires_grad_(), None if table is None else table.double()
    heads = reference(wide, None, wide_table, (N, K, K), H)
    (exact,) = torch.autograd.grad(heads, wide, [g.double() for g in grads])
    assert_rounded_once(got, exact, exact.abs().max())
    torch.testing.assert_close(dbias_C.double(), got.double().sum((0, 1)), rtol=1e-6, atol=1e-5)
    if table is None:
        assert torch.equal(got.double(), exact)
        return
    x_BTNH = normal(2, 37, 5, H, dtype=dtype).to(device).requires_grad_()
    (got,) = torch.autograd.grad(rotary(x_BTNH[:, :, 1:5].transpose(1, 2), table), x_BTNH, grads[:1])
    wide = x_BTNH.detach().double().requires_grad_()
    turned = rotary_reference(wide[:, :, 1:5].transpose(1, 2), wide_table)
    (exact,) = torch.autograd.grad(turned, wide, [grads[0].double()])
    assert_rounded_once(got, exact, grads[0].double().abs().max())
    assert not got[:, :, 0].any()


def test_heads_are_one_tensor_token_by_token(device):
    qkv_BTC, bias_C, table = given(device, 3, 1, 6, torch.bfloat16, "rows")
    q, k, v = split_heads(qkv_BTC, bias_C, table, (3, 1, 1), 6)
    assert len({h.untyped_storage().data_ptr() for h in (q, k, v)}) == 1
    assert q.stride()[1:] == (6, 30, 1)
    q_BNTH = qkv_BTC.detach().unflatten(-1, (-1, 6))[:, :, :3].transpose(1, 2)
    turned = rotary(q_BNTH, table)
    assert turned.transpose(1, 2).is_contiguous()


def in_c(B, T, N, K, H, has_documents):
    """The heads, split and rotated separately, and their gradients; the name of the autograd function."""
    table = normal(2, B, 1, T, H // 2) if has_documents else normal(2, T, H // 2)
    qkv = normal(B, T, (N + 2 * K) * H, seed=1, dtype=torch.bfloat16)
    qkv[0, 0, 1] = torch.nan
    qkv.requires_grad_()
    heads = split_heads(qkv, None, table, (N, K, K), H)
    grads = [normal(B, T, x.shape[1], H, seed=2, dtype=torch.bfloat16).transpose(1, 2) for x in heads]
    torch.autograd.backward(heads, grads)
    x = normal(B, T, N, H, seed=3, dtype=torch.bfloat16).requires_grad_()
    turned = rotary(x.transpose(1, 2), table)
    turned.backward(normal(*turned.shape, seed=4, dtype=torch.bfloat16))
    return [*(t.detach() for t in (*heads, turned)), qkv.grad, x.grad], turned.grad_fn.name()


@needs_c
@pytest.mark.parametrize(
    "shape",
    [(2, 8, 4, 2, 16, False), (2, 37, 4, 4, 32, False), (3, 9, 2, 1, 64, True), (1, 1, 2, 2, 10, False)],
)
def test_heads_in_c_have_torchs_bits(shape, monkeypatch):
    assert_c_is_torch(lambda: in_c(*shape), monkeypatch)


def test_heads_of_fp32_stay_with_torch():
    x = torch.randn(1, 2, 4, 16, requires_grad=True)
    assert "Rotary" not in rotary(x, torch.ones(2, 4, 8)).grad_fn.name()

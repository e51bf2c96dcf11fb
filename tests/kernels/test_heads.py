"""The heads in one pass after their matmul equal plain torch, bit for bit; so are their gradients."""

import pytest
import torch

from narrowgauge.kernels.amax import amax_of_gradient
from narrowgauge.kernels.heads import reference, split_heads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(3, 1, 6), (4, 2, 64), (2, 2, 2)]
POSITIONS = ["none", "rows", "documents"]
# Each position with each dtype and each size.
PAIRS = [(POSITIONS[i], *SIZES[(i + j) % 3], f"dtype{j}") for i in range(3) for j in range(3)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table_of(T, half, *batch):
    angle = torch.rand(*batch, T, half, generator=torch.Generator().manual_seed(1)) * 1000
    return torch.stack([angle.cos(), angle.sin()])


def given(device, N, K, H, dtype, positions, T=37):
    C = (N + 2 * K) * H
    qkv_BTC = normal(2, T, C, dtype=dtype).to(device).requires_grad_()
    bias_C = normal(C, seed=1).to(device).requires_grad_()
    tables = {"none": None, "rows": table_of(T + 3, H // 2)[:, 3:], "documents": table_of(T, H // 2, 2, 1)}
    table = tables[positions]
    return qkv_BTC, bias_C, None if table is None else table.to(device)


@pytest.mark.tier("thorough", keep=PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K", "H"), SIZES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_they_are_torchs_bit_for_bit(device, dtype, N, K, H, positions):
    qkv_BTC, bias_C, table = given(device, N, K, H, dtype, positions)
    for bias in (bias_C, None):
        got = split_heads(qkv_BTC, bias, table, (N, K, K), H)
        expected = reference(qkv_BTC, bias, table, (N, K, K), H)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_gradients_are_turned_back_and_rounded_once(device, dtype, positions):
    """The gradient of the bias: the sum of what was rounded, with its largest magnitude attached to that."""
    N, K, H = 4, 2, 10
    qkv_BTC, bias_C, table = given(device, N, K, H, dtype, positions)
    heads = split_heads(qkv_BTC, bias_C, table, (N, K, K), H)
    # As attention returns them: one token by token, the others head by head.
    grads = [normal(*h.shape, seed=5 + i, dtype=dtype).to(device) for i, h in enumerate(heads)]
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    seen = []
    qkv_BTC.register_hook(lambda g: seen.append(amax_of_gradient(g)))
    got, dbias_C = torch.autograd.grad(heads, (qkv_BTC, bias_C), grads)
    wide, wide_table = qkv_BTC.detach().double().requires_grad_(), None if table is None else table.double()
    heads = reference(wide, None, wide_table, (N, K, K), H)
    (exact,) = torch.autograd.grad(heads, wide, [g.double() for g in grads])
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-22 * exact.abs().max()
    assert ((got.double() - exact).abs() <= bound).all()
    if positions == "none":
        assert torch.equal(got.double(), exact)
    torch.testing.assert_close(dbias_C.double(), got.double().sum((0, 1)), rtol=1e-6, atol=1e-5)
    assert seen[0] == got.abs().max()


def test_bad_numbers_stay_in_their_pair(device):
    qkv_BTC, bias_C, table = given(device, 2, 1, 4, torch.float32, "rows", T=3)
    with torch.no_grad():
        qkv_BTC[0, 0, 1], qkv_BTC[1, 2, 13] = torch.nan, torch.inf
    q, k, v = split_heads(qkv_BTC, bias_C, table, (2, 1, 1), 4)
    assert (~q.isfinite()).nonzero().tolist() == [[0, 0, 0, 1], [0, 0, 0, 3]]
    assert k.isfinite().all()
    assert (~v.isfinite()).nonzero().tolist() == [[1, 0, 2, 1]]


def test_only_one_tensor_is_written_token_by_token(device):
    qkv_BTC, bias_C, table = given(device, 3, 1, 6, torch.bfloat16, "rows")
    q, k, v = split_heads(qkv_BTC, bias_C, table, (3, 1, 1), 6)
    assert len({h.untyped_storage().data_ptr() for h in (q, k, v)}) == 1
    assert q.stride()[1:] == (6, 30, 1)
